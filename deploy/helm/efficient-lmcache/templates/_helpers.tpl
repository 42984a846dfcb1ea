{{/* A name of at most so many characters. What is cut off is told apart by its hash, as two releases' names may begin alike. */}}
{{- define "efficient-lmcache.shortened" -}}
{{- if gt (len .name) .most }}{{ printf "%s-%s" (.name | trunc (int (sub .most 9)) | trimSuffix "-") (sha256sum .name | trunc 8) }}
{{- else }}{{ .name }}{{ end }}
{{- end }}

{{/* Of objects; a release's name may hold dots, a Service's may not. */}}
{{- define "efficient-lmcache.fullname" -}}
{{- $release := .Release.Name | replace "." "-" }}
{{- $name := ternary $release (printf "%s-%s" $release .Chart.Name) (contains .Chart.Name $release) }}
{{- include "efficient-lmcache.shortened" (dict "name" $name "most" 50) }}
{{- end }}

{{- define "efficient-lmcache.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "efficient-lmcache.labels" -}}
{{ include "efficient-lmcache.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "efficient-lmcache.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}
{{- else }}{{ .repository }}:{{ .tag | default (printf "%s-%s" $.Chart.AppVersion $.Values.flavour) }}{{ end }}
{{- end }}
{{- end }}

{{/* Where engines and exporter listen. */}}
{{- define "efficient-lmcache.address" -}}
{{- ternary "::" "0.0.0.0" .Values.ipv6 }}
{{- end }}

{{- define "efficient-lmcache.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "efficient-lmcache.podSecurityContext" -}}
runAsNonRoot: true
{{- with . }}
{{ toYaml . }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "efficient-lmcache.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Of pods that belong to a node, whatever runs there: those that an LMCache server serves. */}}
{{- define "efficient-lmcache.nodePlacement" -}}
{{- range $field := list "nodeSelector" "tolerations" }}
{{- with index $.Values $field }}
{{ $field }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with (.Values.affinity | default dict).nodeAffinity }}
affinity:
  nodeAffinity: {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}

{{/* GiB of an engine: its tier and the processes of every rank, one more process share, the weights, the caches. */}}
{{- define "efficient-lmcache.memoryGib" -}}
{{- $values := .Values }}
{{- $tier := ternary 0 (mulf $values.hostTier.gibPerRank $values.tensorParallel) (eq $values.mode "server") }}
{{- $processes := mulf $values.processGibPerRank (add1 (int $values.tensorParallel)) }}
{{- $kv := ternary $values.cpu.kvCacheGib 0 (eq $values.flavour "cpu") }}
{{- $staging := include "efficient-lmcache.stagingGib" . }}
{{- addf $tier $staging $processes $values.weightsGib $values.sharedMemoryGib $kv | ceil | int }}
{{- end }}

{{/* Anything that is not empty where LMCache in-process keeps chunks behind its CPU tier, too. */}}
{{- define "efficient-lmcache.remoteTier" -}}
{{- $disk := and .Values.lmcache.local_disk .Values.lmcache.max_local_disk_size }}
{{- if or .Values.lmcache.remote_url .Values.lmcache.remote_storage_plugins $disk }}yes{{ end }}
{{- end }}

{{/* All ranks' memory for chunks on their way to or from a remote tier (efficient.remote_staging_gib). */}}
{{- define "efficient-lmcache.stagingGib" -}}
{{- if include "efficient-lmcache.remoteTier" . }}{{ mulf (.Values.efficient.remote_staging_gib | default 1) .Values.tensorParallel }}{{ else }}0{{ end }}
{{- end }}

{{/* The connector's options as JSON, telemetry's and a server's among them. */}}
{{- define "efficient-lmcache.connectorOptions" -}}
{{- $options := dict }}
{{- if include "efficient-lmcache.server" . }}
{{- $options = include "efficient-lmcache.serverOptions" . | fromJson }}
{{- end }}
{{- range $name, $value := .Values.efficient }}
{{- $_ := set $options (printf "efficient.%s" $name) $value }}
{{- end }}
{{- $_ := set $options "efficient.telemetry.transport" .Values.telemetry.transport }}
{{- if eq .Values.telemetry.transport "redis" }}
{{- $_ := set $options "efficient.telemetry.redis_url" (include "efficient-lmcache.redisUrl" .) }}
{{- $_ := set $options "efficient.telemetry.deployment" (include "efficient-lmcache.telemetryDeployment" .) }}
{{- if include "efficient-lmcache.redisSecret" . }}
{{- $_ := set $options "efficient.telemetry.redis_password_file" "/etc/redis-login/password" }}
{{- end }}
{{- end }}
{{- toJson $options }}
{{- end }}

{{/* vLLM's --kv-transfer-config; `null` serves without a connector. */}}
{{- define "efficient-lmcache.transferConfig" -}}
{{- if .Values.hostTier.gibPerRank }}
{{- $options := include "efficient-lmcache.connectorOptions" . | fromJson }}
{{- $config := dict "kv_connector" "EfficientLMCacheConnector" "kv_role" "kv_both" "kv_connector_extra_config" $options }}
{{- if or (include "efficient-lmcache.server" .) (include "efficient-lmcache.remoteTier" .) }}
{{- /* What is outside the engine may be gone by the time of its restore: vLLM would fail the request. */}}
{{- $_ := set $config "kv_load_failure_policy" "recompute" }}
{{- end }}
{{- toJson $config }}
{{- else }}null{{ end }}
{{- end }}

{{/* Never with a password: vLLM logs its configuration, and a pod's arguments are no secret. */}}
{{- define "efficient-lmcache.redisUrl" -}}
{{- if .Values.redis.bundled }}{{ printf "redis://%s-redis:6379/0" (include "efficient-lmcache.fullname" .) }}
{{- else }}{{ .Values.redis.url }}{{ if .Values.redis.caSecret }}?ssl_ca_certs=/etc/redis-ca/{{ .Values.redis.caKey }}{{ end }}{{ end }}
{{- end }}

{{- define "efficient-lmcache.redisSecret" -}}
{{- if .Values.redis.existingSecret }}{{ .Values.redis.existingSecret }}
{{- else if .Values.redis.bundled }}{{ include "efficient-lmcache.fullname" . }}-redis{{ end }}
{{- end }}

{{/* Engines that share a tier are a pool: with a server per node, those of a node. */}}
{{- define "efficient-lmcache.telemetryDeployment" -}}
{{- $node := ternary ".$(HOST_IP)" "" (eq (include "efficient-lmcache.server" .) "daemonset") }}
{{- $name := printf "%s.%s" .Release.Namespace (include "efficient-lmcache.fullname" .) }}
{{- $name = include "efficient-lmcache.shortened" (dict "name" $name "most" (ternary 48 64 (ne $node ""))) }}
{{- .Values.telemetry.deployment | default $name }}{{ $node }}
{{- end }}

{{/* What `$(HOST_IP)` in a container's arguments stands for. */}}
{{- define "efficient-lmcache.hostIp" -}}
- name: HOST_IP
  valueFrom:
    fieldRef: {fieldPath: status.hostIP}
{{- end }}

{{/* The password as a file: a rotated Secret takes effect with the next connection. */}}
{{- define "efficient-lmcache.redisMounts" -}}
{{- if include "efficient-lmcache.redisSecret" . }}
- {name: redis-login, mountPath: /etc/redis-login, readOnly: true}
{{- end }}
{{- if .Values.redis.caSecret }}
- {name: redis-ca, mountPath: /etc/redis-ca, readOnly: true}
{{- end }}
{{- end }}

{{- define "efficient-lmcache.redisVolumes" -}}
{{- with include "efficient-lmcache.redisSecret" . }}
- name: redis-login
  secret:
    secretName: {{ . }}
    items:
      - {key: {{ $.Values.redis.passwordKey }}, path: password}
{{- end }}
{{- with .Values.redis.caSecret }}
- name: redis-ca
  secret: {secretName: {{ . }}}
{{- end }}
{{- end }}
