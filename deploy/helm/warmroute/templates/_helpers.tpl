{{- define "warmroute.name" -}}
{{- if contains "warmroute" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-warmroute" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "warmroute.selector" -}}
app.kubernetes.io/name: warmroute
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "warmroute.labels" -}}
{{ include "warmroute.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "warmroute.tokenSha256" -}}
{{- if .Values.admin.existingSecret }}{{ required "admin.existingSecret needs admin.tokenSha256: printf %s TOKEN | sha256sum" .Values.admin.tokenSha256 }}{{ else if .Values.admin.token }}{{ .Values.admin.token | sha256sum }}{{ end }}
{{- end }}

{{- define "warmroute.keys" -}}
{{- range $key, $value := index .root.Values.tables .table }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}

{{- define "warmroute.hasRedisPassword" -}}
{{- if and .Values.cluster.url (or .Values.cluster.existingSecret .Values.cluster.password) }}yes{{ end }}
{{- end }}

{{- define "warmroute.hasSecret" -}}
{{- if or .Values.engines.apiKey (and .Values.admin.token (not .Values.admin.existingSecret)) (and .Values.cluster.url .Values.cluster.password (not .Values.cluster.existingSecret)) }}yes{{ end }}
{{- end }}

{{- define "warmroute.adminSecret" -}}
{{ .Values.admin.existingSecret | default (include "warmroute.name" .) }}
{{- end }}

{{/* Not empty if KEDA's deprecated external scaler listens. */}}
{{- define "warmroute.kedaPush" -}}
{{- if .Values.keda.enabled }}
{{- if eq .Values.keda.trigger "external-push" }}yes
{{- else if ne .Values.keda.trigger "metrics-api" }}{{ fail "keda.trigger is neither metrics-api nor external-push" }}
{{- end }}
{{- end }}
{{- end }}
