{{- define "balanceroute.name" -}}
{{- .Values.nameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* Labels of everything; those below select pods by `component` too. */ -}}
{{- define "balanceroute.labels" -}}
app.kubernetes.io/name: balanceroute
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "balanceroute.selector" -}}
app.kubernetes.io/name: balanceroute
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "balanceroute.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{- /* Variables of a container: a text or number is the value, a mapping says where it is from. */ -}}
{{- define "balanceroute.env" -}}
{{- range $name, $value := . }}
{{- if kindIs "map" $value }}
- {name: {{ $name }}, valueFrom: {{ toJson $value }}}
{{- else }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{- /* The pod of an engine. .follower: of a node that is not the first of its replica. */ -}}
{{- define "balanceroute.enginePod" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $engines := mergeOverwrite (deepCopy $root.Values.engines) (omit (index $root.Values $role) "args") -}}
{{- $waits := and $root.Values.proxy.adminTokenSecret (not .follower) -}}
{{- $several := gt (int $engines.nodes) 1 -}}
metadata:
  labels:
    {{- include "balanceroute.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $role }}
    balanceroute/engine: "true"
    balanceroute/serves: {{ .follower | ternary "false" "true" | quote }}
  {{- with $engines.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  # Engines ask nothing of the API server.
  automountServiceAccountToken: false
  # After the drain and --shutdown-timeout, within which vLLM ends its requests on SIGTERM.
  terminationGracePeriodSeconds: {{ add (ternary $engines.drainSeconds 5 (not (not $waits))) $engines.shutdownSeconds 30 }}
  {{- with include "balanceroute.scheduling" $engines | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - name: vllm
      image: {{ $engines.image | quote }}
      {{- if $several }}
      command:
        - bash
        - -c
        - |
          local={{ div (int $engines.dataParallel) (int $engines.nodes) }}
          exec vllm serve "$@" --data-parallel-size={{ $engines.dataParallel }} \
            --data-parallel-size-local=$local --data-parallel-address=$LWS_LEADER_ADDRESS \
            --data-parallel-start-rank=$((LWS_WORKER_INDEX * local)){{ if .follower }} --headless{{ end }}
        - bash
      {{- else }}
      command: [vllm, serve]
      {{- end }}
      args:
        {{- toYaml (index $root.Values $role).args | nindent 8 }}
        {{- if eq $role "decode" }}
        - --max-num-seqs={{ $engines.maxNumSeqs }}
        {{- end }}
        - --host=$(POD_IP)
        - --port={{ $engines.port }}
        - --served-model-name
        {{- range $root.Values.models }}
        - {{ . | quote }}
        {{- end }}
        - --shutdown-timeout={{ $engines.shutdownSeconds }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - {name: VLLM_HOST_IP, value: $(POD_IP)}
        - {name: VLLM_NIXL_SIDE_CHANNEL_HOST, value: $(POD_IP)}
        - {name: VLLM_NIXL_SIDE_CHANNEL_PORT, value: {{ $engines.sideChannelPort | quote }}}
        {{- include "balanceroute.env" $engines.env | indent 8 }}
      ports:
        - {name: api, containerPort: {{ $engines.port }}}
        {{- range $i := until (int $engines.sideChannels) }}
        - {name: nixl-{{ $i }}, containerPort: {{ add $engines.sideChannelPort $i }}}
        {{- end }}
      {{- if not .follower }}
      # Loading the weights takes its time: an hour, as for VLLM_ENGINE_READY_TIMEOUT_S.
      startupProbe:
        httpGet: {path: /health, port: api}
        periodSeconds: 10
        failureThreshold: 360
      readinessProbe:
        httpGet: {path: /health, port: api}
        periodSeconds: 5
        timeoutSeconds: 2
      livenessProbe:
        httpGet: {path: /health, port: api}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      lifecycle:
        preStop:
          exec:
            command:
              - sh
              - -c
              {{- if $waits }}
              # vLLM does not wait for KV caches that decoders have still to pull; the proxy does.
              - >-
                curl -sf --max-time {{ add $engines.drainSeconds 5 }}
                -H "Authorization: Bearer $(cat /etc/balanceroute/admin-token)"
                -d "{\"role\": \"{{ $role }}\", \"url\": \"http://$POD_IP:{{ $engines.port }}\", \"wait_s\": {{ $engines.drainSeconds }}}"
                http://{{ include "balanceroute.name" $root }}-admin:9000/admin/instances/drain || sleep 5
              {{- else }}
              # The proxy sees that the pod ends, and sends nothing more.
              - sleep 5
              {{- end }}
      {{- end }}
      {{- if $engines.rdma.enabled }}
      securityContext:
        # Of the user 0 alone: others do not get it.
        capabilities: {add: [IPC_LOCK]}
      {{- end }}
      resources:
        requests: {{- toYaml $engines.resources.requests | nindent 10 }}
        limits:
          {{- toYaml $engines.resources.limits | nindent 10 }}
          nvidia.com/gpu: {{ $engines.gpus }}
          {{- if $engines.rdma.enabled }}
          {{ $engines.rdma.resource }}: {{ $engines.rdma.count }}
          {{- end }}
      volumeMounts:
        - {name: weights, mountPath: /weights, readOnly: true}
        - {name: shm, mountPath: /dev/shm}
        {{- if $waits }}
        - {name: admin-token, mountPath: /etc/balanceroute, readOnly: true}
        {{- end }}
        {{- with $engines.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: weights
      persistentVolumeClaim: {claimName: {{ $engines.weightsClaim }}, readOnly: true}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $engines.shmSize }}}
    {{- if $waits }}
    - name: admin-token
      secret: {secretName: {{ $root.Values.proxy.adminTokenSecret }}, defaultMode: 0440}
    {{- end }}
    {{- with $engines.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
