{{/* Parts of a pod. All take the context of specdec.workload: dict "root" "component" "pool" "values" "model". */}}

{{- define "specdec.scheduling" -}}
{{- $values := .values -}}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $affinity := deepCopy $values.affinity }}
{{- with $values.zones }}
{{-   $zones := dict "key" "topology.kubernetes.io/zone" "operator" "In" "values" . }}
{{-   $term := dict "matchExpressions" (list $zones) }}
{{-   $_ := set $affinity "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" (list $term))) }}
{{- end }}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $constraint := deepCopy . }}
  {{- if not $constraint.labelSelector }}
  {{-   $_ := set $constraint "labelSelector" (dict "matchLabels" (include "specdec.selectorLabels" $ | fromYaml)) }}
  {{- end }}
  - {{ toYaml $constraint | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "specdec.volumes" -}}
{{- $all := .root.Values -}}
{{- $front := eq .component "orchestrator" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ $all.tmp.sizeLimit | quote }}
{{ include "specdec.modelVolume" .model }}
{{- with (.values.shm | default dict).sizeLimit }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ . | quote }}
{{- end }}
{{- if and $front $all.tls.front.enabled }}
- name: front
  secret:
    secretName: {{ include "specdec.frontSecret" .root | quote }}
    defaultMode: 0440
{{- end }}
{{- if $all.tls.internal.enabled }}
- name: internal
  secret:
    secretName: {{ ternary (include "specdec.orchestratorSecret" .root) (include "specdec.poolsSecret" .root) $front | quote }}
    defaultMode: 0440
{{- end }}
{{- if and $front $all.auth.existingSecret }}
- name: auth
  secret:
    secretName: {{ $all.auth.existingSecret | quote }}
    defaultMode: 0440
    items:
      - key: {{ $all.auth.existingSecretKey | quote }}
        path: tokens
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "specdec.volumeMounts" -}}
{{- $all := .root.Values -}}
{{- $front := eq .component "orchestrator" -}}
- name: tmp
  mountPath: /tmp
- name: model
  mountPath: {{ include "specdec.modelFolder" . }}
  readOnly: true
{{- if (.values.shm | default dict).sizeLimit }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- if and $front $all.tls.front.enabled }}
- name: front
  mountPath: /run/specdec/front
  readOnly: true
{{- end }}
{{- if $all.tls.internal.enabled }}
- name: internal
  mountPath: /run/specdec/internal
  readOnly: true
{{- end }}
{{- if and $front $all.auth.existingSecret }}
- name: auth
  mountPath: /run/specdec/auth
  readOnly: true
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A budget over a single replica would only hold up every node drain. */}}
{{- define "specdec.disruptionBudget" -}}
{{- $values := .values -}}
{{- $most := ternary $values.autoscaling.maxReplicas $values.replicas (eq (include "specdec.autoscaled" $values) "true") -}}
{{- if and $values.podDisruptionBudget.enabled (gt (int $most) 1) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "specdec.objectName" . }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "specdec.labels" . | nindent 4 }}
spec:
  {{- with $values.podDisruptionBudget }}
  {{- if not (or (kindIs "invalid" .minAvailable) (eq (toString .minAvailable) "")) }}
  minAvailable: {{ .minAvailable }}
  {{- else }}
  maxUnavailable: {{ .maxUnavailable | default 1 }}
  {{- end }}
  unhealthyPodEvictionPolicy: {{ .unhealthyPodEvictionPolicy }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "specdec.selectorLabels" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* ipFamilyPolicy and ipFamilies of a Service, or nothing; to be indented by its caller. Takes the root. */}}
{{- define "specdec.ipFamilies" -}}
{{- $fields := dict -}}
{{- with .Values.network.ipFamilyPolicy -}}{{- $_ := set $fields "ipFamilyPolicy" . -}}{{- end -}}
{{- with .Values.network.ipFamilies -}}{{- $_ := set $fields "ipFamilies" . -}}{{- end -}}
{{- with $fields -}}{{- toYaml . -}}{{- end -}}
{{- end -}}

{{/*
Service without an address of its own: its name has one record per replica, and callers hold a connection to each.
Takes dict "root" $ "component" c "pool" p.
*/}}
{{- define "specdec.headlessService" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "specdec.objectName" . }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "specdec.labels" . | nindent 4 }}
spec:
  clusterIP: None
  {{- with include "specdec.ipFamilies" .root }}
  {{- . | nindent 2 }}
  {{- end }}
  ports:
    - name: grpc
      port: {{ include "specdec.port" .component }}
      targetPort: grpc
  selector:
    {{- include "specdec.selectorLabels" . | nindent 4 }}
{{- end -}}
