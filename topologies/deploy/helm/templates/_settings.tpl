{{- /* The proxy's settings as TOML: JSON of texts, numbers, truth values and lists is that too. */ -}}
{{- define "balanceroute.settings" -}}
{{- $proxy := .Values.proxy -}}
{{- $settings := dict "host" "0.0.0.0" "lease_s" .Values.leaseSeconds -}}
{{- if .Values.engines.enabled -}}
{{- $found := printf "kubernetes:app.kubernetes.io/instance=%s,balanceroute/role" .Release.Name -}}
{{- $settings = merge $settings (dict "discover" (list $found) "batch" .Values.decode.maxNumSeqs) -}}
{{- else if not (or $proxy.settings.discover (and $proxy.prefill $proxy.decode)) -}}
{{- fail "engines.enabled is false: name the engines in proxy.prefill and proxy.decode, or in proxy.settings.discover" -}}
{{- end -}}
{{- if gt (int $proxy.replicas) 1 -}}
{{- if $proxy.state.enabled -}}
{{- fail "proxy.state has one claim, which several replicas cannot write: proxy.replicas is more than 1" -}}
{{- end -}}
{{- $settings = merge $settings (dict "leader_lease" (include "balanceroute.name" .)) -}}
{{- end -}}
{{- if $proxy.state.enabled -}}
{{- $state := "/var/lib/balanceroute" -}}
{{- $settings = merge $settings (dict "roster_state" (print $state "/roster.json") "predictor_state" (print $state "/predictor.json")) -}}
{{- end -}}
{{- $keys := "/etc/balanceroute-keys" -}}
{{- if $proxy.apiKeySecret -}}
{{- $settings = merge $settings (dict "api_key_file" (print $keys "/api-keys")) -}}
{{- end -}}
{{- if $proxy.tenantsSecret -}}
{{- $settings = merge $settings (dict "tenants" (print $keys "/tenants.toml")) -}}
{{- end -}}
{{- if $proxy.engineKeySecret -}}
{{- $settings = merge $settings (dict "engine_key_file" (print $keys "/engine-key")) -}}
{{- end -}}
{{- if $proxy.adminTokenSecret -}}
{{- $settings = merge $settings (dict "admin_host" "0.0.0.0" "admin_token_file" (print $keys "/admin-token")) -}}
{{- end -}}
{{- if $proxy.tlsSecret -}}
{{- $settings = merge $settings (dict "tls_cert" (print $keys "/tls.crt") "tls_key" (print $keys "/tls.key")) -}}
{{- end -}}
{{- if $proxy.http3 -}}
{{- if not $proxy.tlsSecret -}}
{{- fail "proxy.http3 needs a certificate: name its Secret in proxy.tlsSecret" -}}
{{- end -}}
{{- $settings = merge $settings (dict "http3" true) -}}
{{- end -}}
{{- if $proxy.inferencePool.name -}}
{{- $settings = merge $settings (dict "picker_metrics" (list "vllm")) -}}
{{- end -}}
{{- if $proxy.picker.mode -}}
{{- if $proxy.inferencePool.name -}}
{{- fail "a pool has proxies or engines: proxy.inferencePool.name and proxy.picker.mode are both there" -}}
{{- else if and .Values.engines.enabled (eq $proxy.picker.mode "sidecar") -}}
{{- fail "the chart's decode pods have no sidecar: proxy.picker.mode is sidecar, and engines.enabled" -}}
{{- else if not (or .Values.engines.enabled $proxy.picker.engines) -}}
{{- fail "engines.enabled is false: name the labels of the engines' pods in proxy.picker.engines" -}}
{{- else if and .Values.networkPolicy.enabled (not .Values.networkPolicy.gateway) -}}
{{- fail "a gateway must reach the picker and the engines: name where it runs in networkPolicy.gateway" -}}
{{- end -}}
{{- $settings = merge $settings (dict "pick" $proxy.picker.mode "pick_host" "0.0.0.0") -}}
{{- end }}
name = {{ include "balanceroute.name" . | toJson }}
model = {{ .Values.models | toJson }}
connector = {{ .Values.connector | toJson }}
{{- range $role := list "prefill" "decode" }}
{{- range index $proxy $role }}

[[{{ $role }}]]
{{- range $name, $value := . }}
{{ $name }} = {{ $value | toJson }}
{{- end }}
{{- end }}
{{- end }}

[proxy]
{{- /* What the values say goes before what follows from others. */ -}}
{{- range $name, $value := merge (deepCopy $proxy.settings) $settings }}
{{ $name }} = {{ $value | toJson }}
{{- end }}
{{- end -}}
