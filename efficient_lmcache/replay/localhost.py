"""HTTP to our own server on this machine."""

from __future__ import annotations

import urllib.request

# A proxy of the environment (`http_proxy`) cannot reach this machine's loopback.
open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
