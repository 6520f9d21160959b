{{- define "kv.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{- define "kv.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kv.labels" -}}
{{ include "kv.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "kv.secret" -}}
{{ .Values.key.existingSecret | default (printf "%s-key" (include "kv.name" .)) }}
{{- end }}

{{/* One side's values: `engine`, and over it what the side says. Takes (list . "prefill"). */}}
{{- define "kv.side" -}}
{{- $root := index . 0 }}
{{- mustMergeOverwrite (deepCopy $root.Values.engine) (deepCopy (index $root.Values (index . 1))) | toJson }}
{{- end }}

{{/* The routers' names, as a JSON list: each pod has one of its own, whatever its address is. */}}
{{- define "kv.routers" -}}
{{- $name := include "kv.name" . }}
{{- $routers := list }}
{{- range $i := until (int .Values.router.replicas) }}
{{- $routers = append $routers (printf "%s-router-%d.%s-router-pods.%s.svc:8500" $name $i $name $.Release.Namespace) }}
{{- end }}
{{- $routers | toJson }}
{{- end }}

{{/* "HTTPS" if the router's arguments give its first port a certificate, else "HTTP". */}}
{{- define "kv.routerScheme" -}}
{{- $scheme := "HTTP" }}
{{- range .Values.router.args }}
{{- if regexMatch "^--ssl-certfile(=|$)" . }}{{ $scheme = "HTTPS" }}{{ end }}
{{- end }}
{{- $scheme }}
{{- end }}

{{/* A pod's address as it stands in a URL. */}}
{{- define "kv.podHost" -}}
{{ ternary "[$(POD_IP)]" "$(POD_IP)" (eq .Values.ipFamily "IPv6") }}
{{- end }}

{{/* An engine pod's security context. Takes a side's values. The key's file belongs to root: a container of another user
reads it through the group fsGroup. OnRootMismatch spares a large volume a walk through all its files. */}}
{{- define "kv.podSecurity" -}}
{{- $given := deepCopy .podSecurityContext }}
{{- if $given }}
{{- $given = merge $given (dict "fsGroup" (default 65534 $given.runAsGroup) "fsGroupChangePolicy" "OnRootMismatch") }}
{{- end }}
{{- merge $given (dict "seccompProfile" (dict "type" "RuntimeDefault")) | toYaml }}
{{- end }}

{{- define "kv.keyVolume" -}}
- name: key
  secret:
    secretName: {{ include "kv.secret" . }}
    items: [{key: key, path: key}]
    defaultMode: 0440
{{- end }}

{{/* Refusals that a schema cannot express. */}}
{{- define "kv.check" -}}
{{- if .Values.llmd.enabled }}
{{- if not .Values.llmd.sidecarImage }}{{ fail "llmd.sidecarImage: name the image of llm-d's routing sidecar" }}{{ end }}
{{- else if not .Values.images.router }}{{ fail "images.router: name an image that has kv-connector[router]; images.engine does" }}
{{- end }}
{{- range $arg := .Values.router.args }}
{{- if and $.Values.monitoring.podMonitor (not $.Values.router.adminPort) (regexMatch "^--(ssl-certfile|api-key-file)(=|$)" $arg) }}
{{- fail (printf "monitoring.podMonitor: Prometheus cannot read a router with %s at its first port: set router.adminPort" $arg) }}
{{- end }}
{{- end }}
{{- range $name := list "prefill" "decode" }}
{{- $side := include "kv.side" (list $ $name) | fromJson }}
{{- if not $side.settings.providers }}
{{- fail (printf "%s: settings.providers: name the lanes, as pods reach each other's GPUs by no NVLink: [verbs], [libfabric], [bounce] over tcp; for engines on CPUs [tcp]" $name) }}
{{- end }}
{{- range $setting := list "control_host" "control_port" "control_key_file" "routers" "api_url" }}
{{- if hasKey $side.settings $setting }}
{{- fail (printf "%s: settings.%s is the chart's to set: a pod has its own address, and its key is mounted" $name $setting) }}
{{- end }}
{{- end }}
{{- range $arg := $side.args }}
{{- if regexMatch "^--(port|kv-transfer-config|shutdown-timeout|nnodes|node-rank|master-addr|headless)\\b" (toString $arg) }}
{{- fail (printf "%s: args has %s, which the chart sets itself" $name $arg) }}
{{- end }}
{{- end }}
{{- if and $side.autoscaling.enabled (not $side.autoscaling.metrics) (not $side.autoscaling.external) }}
{{- fail (printf "%s: autoscaling.metrics is empty: name a metric of its pods and the average to hold" $name) }}
{{- end }}
{{- if and $side.autoscaling.enabled (gt (int $side.autoscaling.minReplicas) (int $side.autoscaling.maxReplicas)) }}
{{- fail (printf "%s: autoscaling.minReplicas is above autoscaling.maxReplicas" $name) }}
{{- end }}
{{- end }}
{{- end }}
