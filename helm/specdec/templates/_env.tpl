{{/*
Environment of a service's container. What is set here is what the chart decides; tools/chart_settings.py lists it with the reasons.
Everything else comes from the component's `config`.
*/}}

{{/* One entry. Takes list name value. */}}
{{- define "specdec.variable" -}}
- name: {{ index . 0 }}
  value: {{ index . 1 | toString | quote }}
{{- end -}}

{{/* A config's value as the service reads it: whole numbers without exponent, lists with commas. */}}
{{- define "specdec.settingValue" -}}
{{- if kindIs "slice" . -}}
{{-   $parts := list -}}
{{-   range . -}}{{- $parts = append $parts (include "specdec.settingValue" .) -}}{{- end -}}
{{-   $parts | join "," -}}
{{- else if and (kindIs "float64" .) (eq . (floor .)) -}}
{{-   int64 . -}}
{{- else -}}
{{-   toString . -}}
{{- end -}}
{{- end -}}

{{/* Takes dict "root" $ "component" c "pool" p "values" v "model" m. */}}
{{- define "specdec.env" -}}
{{- $all := .root.Values -}}
{{- $front := eq .component "orchestrator" -}}
{{ include "specdec.variable" (list "SPECDEC_HOST" $all.network.listenAddress) }}
{{ include "specdec.variable" (list "SPECDEC_PORT" (include "specdec.port" .component)) }}
{{ include "specdec.variable" (list "SPECDEC_METRICS_PORT" (include "specdec.port" "metrics")) }}
{{ include "specdec.variable" (list "SPECDEC_HEALTH_PORT" (include "specdec.port" "health")) }}
{{- with $all.telemetry.otlpEndpoint }}
{{ include "specdec.variable" (list "SPECDEC_OTLP_ENDPOINT" .) }}
{{- end }}
{{- if $front }}
{{ include "specdec.variable" (list "SPECDEC_TOKENIZER" (include "specdec.modelPath" .model)) }}
{{ include "specdec.variable" (list "SPECDEC_TARGETS" (include "specdec.entries" (dict "root" .root "component" "target"))) }}
{{ include "specdec.variable" (list "SPECDEC_DRAFTS" (include "specdec.entries" (dict "root" .root "component" "draft"))) }}
{{- if include "specdec.externalScaler" .root }}
{{ include "specdec.variable" (list "SPECDEC_SCALER_PORT" (include "specdec.port" "scaler")) }}
{{ include "specdec.variable" (list "SPECDEC_PEERS" (include "specdec.peers" .root)) }}
{{- end }}
{{- else }}
{{ include "specdec.variable" (list "SPECDEC_MODEL" (include "specdec.modelPath" .model)) }}
{{- $onGpu := gt (int .values.gpu.count) 0 }}
{{ include "specdec.variable" (list "SPECDEC_DEVICE" (ternary "cuda" "cpu" $onGpu)) }}
{{- if and $onGpu (not .values.config.dtype) }}
{{- /* The services' defaults, int8 and int4, are the CPU's. */}}
{{ include "specdec.variable" (list "SPECDEC_DTYPE" "bfloat16") }}
{{- end }}
{{- end }}
{{- range $key, $value := .values.config }}
{{- if not (kindIs "invalid" $value) }}
{{ include "specdec.variable" (list (printf "SPECDEC_%s" (snakecase $key | upper)) (include "specdec.settingValue" $value)) }}
{{- end }}
{{- end }}
{{- include "specdec.securityEnv" (dict "root" .root "front" $front) }}
{{- /* Models are mounted; nothing is fetched while a service runs, and /tmp is all it may write. */}}
{{ include "specdec.variable" (list "HF_HUB_OFFLINE" "1") }}
{{ include "specdec.variable" (list "HOME" "/tmp") }}
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* TLS and tokens: docs/operations.md, "TLS and tokens". Takes dict "root" $ "front" bool. */}}
{{- define "specdec.securityEnv" -}}
{{- $tls := .root.Values.tls -}}
{{- $auth := .root.Values.auth -}}
{{- if .front }}
{{- with $tls.front }}
{{- if .enabled }}
{{ include "specdec.variable" (list "SPECDEC_TLS_CERT" "/run/specdec/front/tls.crt") }}
{{ include "specdec.variable" (list "SPECDEC_TLS_KEY" "/run/specdec/front/tls.key") }}
{{- if .clientCertificates }}
{{ include "specdec.variable" (list "SPECDEC_TLS_CLIENT_CA" "/run/specdec/front/ca.crt") }}
{{- with .allowedIdentities }}
{{ include "specdec.variable" (list "SPECDEC_ALLOWED_IDENTITIES" (join "," .)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if $tls.internal.enabled }}
{{ include "specdec.variable" (list "SPECDEC_TLS_CA" "/run/specdec/internal/ca.crt") }}
{{ include "specdec.variable" (list "SPECDEC_TLS_CLIENT_CERT" "/run/specdec/internal/tls.crt") }}
{{ include "specdec.variable" (list "SPECDEC_TLS_CLIENT_KEY" "/run/specdec/internal/tls.key") }}
{{ include "specdec.variable" (list "SPECDEC_TLS_SERVER_NAME" (include "specdec.poolsServerName" .root)) }}
{{- end }}
{{- if $auth.existingSecret }}
{{ include "specdec.variable" (list "SPECDEC_TOKENS_FILE" "/run/specdec/auth/tokens") }}
{{- if $auth.allowInsecure }}
{{ include "specdec.variable" (list "SPECDEC_ALLOW_INSECURE_TOKENS" "true") }}
{{- end }}
{{- end }}
{{- else if $tls.internal.enabled }}
{{ include "specdec.variable" (list "SPECDEC_TLS_CERT" "/run/specdec/internal/tls.crt") }}
{{ include "specdec.variable" (list "SPECDEC_TLS_KEY" "/run/specdec/internal/tls.key") }}
{{ include "specdec.variable" (list "SPECDEC_TLS_CLIENT_CA" "/run/specdec/internal/ca.crt") }}
{{- with include "specdec.poolsAllowedIdentities" .root }}
{{ include "specdec.variable" (list "SPECDEC_ALLOWED_IDENTITIES" .) }}
{{- end }}
{{- end }}
{{- end -}}
