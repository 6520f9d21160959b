{{/* An engine's pod. Takes (dict "root" . "name" "prefill" "side" $side "worker" false): the worker of an engine of several
hosts computes and has no API server. */}}
{{- define "kv.enginePod" -}}
{{- $root := .root }}
{{- $side := .side }}
{{- $llmd := $root.Values.llmd.enabled }}
{{- $behindSidecar := and $llmd (eq .name "decode") }}
{{- $port := ternary 8200 8000 $behindSidecar }}
{{- $settings := dict "control_port" 5600 }}
{{- if not $llmd }}
{{- $_ := set $settings "routers" (include "kv.routers" $root | fromJsonArray) }}
{{- $_ := set $settings "api_url" (printf "http://%s:%d" (include "kv.podHost" $root) $port) }}
{{- end }}
{{- $transfer := dict "kv_connector" "WriteImmConnector" }}
{{- $_ := set $transfer "kv_role" (ternary "kv_producer" "kv_consumer" (eq .name "prefill")) }}
{{- $_ := set $transfer "kv_connector_extra_config" (mustMerge $settings $side.settings) -}}
metadata:
  labels:
    {{- include "kv.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
    {{- if $llmd }}
    llm-d.ai/role: {{ .name }}
    llm-d.ai/inference-serving: "true"
    {{- end }}
    {{- with $side.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $side.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  terminationGracePeriodSeconds: {{ add $side.drainSeconds $side.shutdownSeconds 10 }}
  {{- if $side.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  securityContext: {{- include "kv.podSecurity" $side | nindent 4 }}
  automountServiceAccountToken: false
  {{- with $root.Values.images.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $behindSidecar (not .worker) }}
  initContainers:
    - name: routing-sidecar
      image: {{ $root.Values.llmd.sidecarImage }}
      restartPolicy: Always
      # Prefill and decode at once: the prefill pod's control port is the same on every pod.
      args:
        - --port=8000
        - --vllm-port={{ $port }}
        - --kv-connector=nixlv2
        - --moriio-write-mode
        - --moriio-parallel-dispatch
        - --moriio-prefill-handshake-port=5600
        - --moriio-local-pod-ip=$(POD_IP)
      env:
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
      ports: [{name: sidecar, containerPort: 8000}]
      securityContext:
        allowPrivilegeEscalation: false
        runAsNonRoot: true
        capabilities: {drop: [ALL]}
  {{- end }}
  containers:
    - name: vllm
      image: {{ $root.Values.images.engine }}
      imagePullPolicy: {{ $root.Values.images.pullPolicy }}
      command: [vllm, serve]
      args:
        - {{ $root.Values.model | quote }}
        - --port={{ $port }}
        {{- if eq $root.Values.ipFamily "IPv6" }}
        - "--host=::"
        {{- end }}
        - --shutdown-timeout={{ $side.shutdownSeconds }}
        {{- if gt (int $side.hosts) 1 }}
        - --nnodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --master-addr=$(LWS_LEADER_ADDRESS)
        {{- end }}
        {{- if .worker }}
        - --headless
        {{- end }}
        {{- range $side.args }}
        - {{ . | quote }}
        {{- end }}
        - --kv-transfer-config
        - {{ $transfer | toJson | squote }}
      env:
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        # The control sockets bind it.
        - {name: VLLM_HOST_IP, value: $(POD_IP)}
        - {name: KV_CONNECTOR_KEY_FILE, value: /var/run/kv-connector/key}
        {{- if $llmd }}
        # The sidecar keeps idle connections for 90 s.
        - {name: VLLM_HTTP_TIMEOUT_KEEP_ALIVE, value: "120"}
        {{- end }}
        {{- with $side.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- if not .worker }}
        - {name: http, containerPort: {{ $port }}}
        {{- end }}
        {{- range $rank := until (int $side.ranks) }}
        - {name: control-{{ $rank }}, containerPort: {{ add 5600 $rank }}}
        {{- end }}
      {{- if not .worker }}
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        failureThreshold: {{ div (add $side.startSeconds 9) 10 }}
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      lifecycle:
        preStop:
          exec:
            command:
              - sh
              - -c
              {{- if $llmd }}
              # Until no router sends requests to it any more.
              - sleep {{ $side.drainSeconds }}
              {{- else }}
              - >-
                exec kv-connector drain "http://{{ ternary "[$POD_IP]" "$POD_IP" (eq $root.Values.ipFamily "IPv6") }}:{{ $port }}" --force --timeout {{ $side.drainSeconds }}
                {{- range include "kv.routers" $root | fromJsonArray }} --router {{ . }}{{ end }}
              {{- end }}
      {{- else }}
      lifecycle:
        preStop:
          exec:
            command:
              - sh
              - -c
              # All pods of an engine get SIGTERM at once. This pod computes until its leader has ended.
              - >-
                while python3 -c "import urllib.request as r; r.urlopen('http://$LWS_LEADER_ADDRESS:8000/health',
                timeout=5)"; do sleep 1; done
      {{- end }}
      resources: {{- toYaml $side.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
          {{- with $side.capabilities }}
          add: {{- toYaml . | nindent 12 }}
          {{- end }}
      volumeMounts:
        - {name: key, mountPath: /var/run/kv-connector, readOnly: true}
        - {name: shm, mountPath: /dev/shm}
        {{- with $side.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "kv.keyVolume" $root | nindent 4 }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $side.sharedMemory }}}
    {{- with $side.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $side.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $side.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $side.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
