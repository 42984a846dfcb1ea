{{/* How LMCache's server runs: daemonset, sidecar, or empty where LMCache runs in the engines. */}}
{{- define "efficient-lmcache.server" -}}
{{- if eq .Values.mode "server" }}{{ .Values.lmcacheServer.kind }}{{ end }}
{{- end }}

{{/* The share of its tier from which on the server evicts: LMCache's default, given as the tier's size depends on it. */}}
{{- define "efficient-lmcache.watermark" -}}0.8{{- end }}

{{/* GiB of the server's tier: what all ranks of an engine can rely on is what it holds before it evicts. */}}
{{- define "efficient-lmcache.l1Gib" -}}
{{- divf (mulf .Values.hostTier.gibPerRank .Values.tensorParallel) (include "efficient-lmcache.watermark" .) }}
{{- end }}

{{- define "efficient-lmcache.serverMemoryGib" -}}
{{- addf (include "efficient-lmcache.l1Gib" .) .Values.lmcacheServer.processGib | ceil | int }}
{{- end }}

{{/* The host of the engine's own server. The DaemonSet's Service sends an engine to the server on its node alone. */}}
{{- define "efficient-lmcache.serverHost" -}}
{{- if eq .Values.lmcacheServer.kind "sidecar" }}127.0.0.1{{ else }}{{ include "efficient-lmcache.fullname" . }}-server{{ end }}
{{- end }}

{{/* CUDA's handles need a common /dev/shm, which only the containers of one pod have here. */}}
{{- define "efficient-lmcache.isolatedIpc" -}}
{{- if and (eq .Values.flavour "gpu") (eq (include "efficient-lmcache.server" .) "daemonset") }}true{{ end }}
{{- end }}

{{/* What the engine's connector is told of the server, as JSON. */}}
{{- define "efficient-lmcache.serverOptions" -}}
{{- $host := include "efficient-lmcache.serverHost" . }}
{{- $options := dict "efficient.mode" "server" }}
{{- $_ := set $options "efficient.server.http_url" (printf "http://%s:%d" $host (int .Values.lmcacheServer.httpPort)) }}
{{- $_ := set $options "lmcache.mp.host" (printf "tcp://%s" $host) }}
{{- $_ := set $options "lmcache.mp.port" (int .Values.lmcacheServer.port) }}
{{- if include "efficient-lmcache.isolatedIpc" . }}
{{- $_ := set $options "lmcache.mp.isolated_ipc" true }}
{{- end }}
{{- range $name, $value := .Values.lmcache }}
{{- $_ := set $options (printf "lmcache.%s" $name) $value }}
{{- end }}
{{- toJson $options }}
{{- end }}

{{/* A monitor of what a NetworkPolicy closes would only report that it is down. */}}
{{- define "efficient-lmcache.serverScraped" -}}
{{- if and .Values.serviceMonitor.enabled (or (not .Values.networkPolicy.enabled) .Values.lmcacheServer.metricsFrom) }}true{{ end }}
{{- end }}

{{/* By number: network plugins need not know the named ports of a sidecar. */}}
{{- define "efficient-lmcache.metricsIngress" -}}
{{- with .Values.lmcacheServer.metricsFrom }}
- from: {{- toYaml . | nindent 4 }}
  ports:
    - port: {{ int $.Values.lmcacheServer.httpPort }}
{{- end }}
{{- end }}

{{- define "efficient-lmcache.serverContainer" -}}
{{- $sidecar := eq .Values.lmcacheServer.kind "sidecar" }}
{{- $cpu := eq .Values.flavour "cpu" }}
{{- $memory := printf "%sGi" (include "efficient-lmcache.serverMemoryGib" .) }}
{{- with .Values.lmcacheServer -}}
- name: lmcache-server
  image: {{ include "efficient-lmcache.image" $ | quote }}
  imagePullPolicy: {{ $.Values.image.pullPolicy }}
  {{- if $sidecar }}
  # Starts before the engine and ends after it.
  restartPolicy: Always
  {{- end }}
  command: [lmcache, server]
  args:
    - --host={{ ternary "127.0.0.1" "0.0.0.0" $sidecar }}
    - --port={{ int .port }}
    - --http-host=0.0.0.0
    - --http-port={{ int .httpPort }}
    - --chunk-size={{ int $.Values.hostTier.chunkTokens }}
    - --l1-size-gb={{ include "efficient-lmcache.l1Gib" $ }}
    # All of it at the start, or no start: engines hold their working set against it.
    - --no-l1-use-lazy
    - --eviction-policy=LRU
    - --eviction-trigger-watermark={{ include "efficient-lmcache.watermark" $ }}
    {{- if $cpu }}
    # Workers on CPUs move their KV themselves, which the server must allow: otherwise they wait for ever.
    - --supported-transfer-mode=auto
    {{- end }}
    {{- if include "efficient-lmcache.isolatedIpc" $ }}
    - --isolated-ipc
    {{- end }}
    {{- range .args }}
    - {{ . | quote }}
    {{- end }}
  env:
    - name: PYTHONHASHSEED
      value: "0"
    - name: LMCACHE_TRACK_USAGE
      value: "false"
    - name: LMCACHE_DISABLE_BANNER
      value: "1"
    - name: HOME
      value: /tmp
    - name: USER
      value: engine
    {{- if not $cpu }}
    # It copies from and to the engines' GPUs, and so must see them without taking them from the engines.
    - name: NVIDIA_VISIBLE_DEVICES
      value: all
    - name: NVIDIA_DRIVER_CAPABILITIES
      value: compute,utility
    {{- end }}
    {{- with $.Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - name: lmcache
      containerPort: {{ int .port }}
    - name: lmcache-http
      containerPort: {{ int .httpPort }}
  startupProbe:
    httpGet: {path: /healthcheck, port: lmcache-http}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: {{ divf $.Values.startupTimeoutSeconds 5 | ceil | int }}
  readinessProbe:
    httpGet: {path: /healthcheck, port: lmcache-http}
    periodSeconds: 5
    timeoutSeconds: 5
  livenessProbe:
    httpGet: {path: /healthcheck, port: lmcache-http}
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: 6
  resources:
    requests:
      cpu: {{ .cpus }}
      memory: {{ $memory }}
    limits:
      {{- if $cpu }}
      cpu: {{ .cpus }}
      {{- end }}
      memory: {{ $memory }}
  securityContext: {{- include "efficient-lmcache.containerSecurityContext" $ | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    {{- if $sidecar }}
    - {name: shm, mountPath: /dev/shm}
    {{- end }}
    {{- with $.Values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}
