{{- /* The proxy's settings as TOML: JSON of texts, numbers, truth values and lists is that too. */ -}}
{{- define "balanceroute.settings" -}}
{{- $proxy := .Values.proxy -}}
name = {{ include "balanceroute.name" . | toJson }}
model = {{ .Values.models | toJson }}
connector = {{ .Values.connector | toJson }}

[proxy]
host = "0.0.0.0"
discover = [{{ printf "kubernetes:app.kubernetes.io/instance=%s,balanceroute/role" .Release.Name | toJson }}]
batch = {{ .Values.decode.maxNumSeqs }}
lease_s = {{ .Values.leaseSeconds }}
{{- if $proxy.state.enabled }}
roster_state = "/var/lib/balanceroute/roster.json"
predictor_state = "/var/lib/balanceroute/predictor.json"
{{- end }}
{{- if $proxy.apiKeySecret }}
api_key_file = "/etc/balanceroute-keys/api-keys"
{{- end }}
{{- if $proxy.adminTokenSecret }}
admin_host = "0.0.0.0"
admin_token_file = "/etc/balanceroute-keys/admin-token"
{{- end }}
{{- if $proxy.tlsSecret }}
tls_cert = "/etc/balanceroute-keys/tls.crt"
tls_key = "/etc/balanceroute-keys/tls.key"
{{- end }}
{{- range $name, $value := $proxy.settings }}
{{ $name }} = {{ $value | toJson }}
{{- end }}
{{- end -}}
