{{/*
Names of Secrets and of what certificates say. The Secrets are the user's, or cert-manager makes them (certificates.yaml).
Each holds tls.crt, tls.key and, where authorities are needed, ca.crt. They are mounted as folders, never file by file: only then
does a renewed certificate reach a running container.
*/}}

{{/* Secret with what clients see of the orchestrators. Takes the root. */}}
{{- define "specdec.frontSecret" -}}
{{- .Values.tls.front.existingSecret | default (printf "%s-front-tls" (include "specdec.fullname" .)) -}}
{{- end -}}

{{/* Secret with what the pools see of the orchestrators. Takes the root. */}}
{{- define "specdec.orchestratorSecret" -}}
{{- .Values.tls.internal.orchestratorSecret | default (printf "%s-orchestrator-tls" (include "specdec.fullname" .)) -}}
{{- end -}}

{{/* Secret of targets and drafts. Takes the root. */}}
{{- define "specdec.poolsSecret" -}}
{{- .Values.tls.internal.poolsSecret | default (printf "%s-pools-tls" (include "specdec.fullname" .)) -}}
{{- end -}}

{{/* The one name that certificates of targets and drafts carry: replicas are dialled by address. Takes the root. */}}
{{- define "specdec.poolsServerName" -}}
{{- .Values.tls.internal.serverName | default (printf "%s-pools.%s" (include "specdec.fullname" .) .Release.Namespace) -}}
{{- end -}}

{{/* The name in the orchestrators' certificate towards the pools, where cert-manager makes it. Takes the root. */}}
{{- define "specdec.orchestratorIdentity" -}}
{{- printf "%s.%s" (include "specdec.objectName" (dict "root" . "component" "orchestrator")) .Release.Namespace -}}
{{- end -}}

{{/* Whom the pools serve, comma separated; nothing = any certificate of the authorities. Takes the root. */}}
{{- define "specdec.poolsAllowedIdentities" -}}
{{- $internal := .Values.tls.internal -}}
{{- $own := ternary list (list (include "specdec.orchestratorIdentity" .)) (not (empty $internal.orchestratorSecret)) -}}
{{- concat $own $internal.allowedIdentities | uniq | join "," -}}
{{- end -}}
