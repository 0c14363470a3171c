{{/*
How pools are scaled by their own load: docs/kubernetes.md, "Scaling". Loads are in replicas' worth over the whole pool, so that the
desired replicas are load / threshold: an average over replicas, for Kubernetes.
*/}}

{{/*
How fast a pool grows and shrinks. Sessions hold keys and values where they are, so a replica that goes costs each of them its prompt
again: one at a time, and only when none was needed for five minutes. Takes the workload's values.
*/}}
{{- define "specdec.scalingBehavior" -}}
{{- if .autoscaling.behavior -}}
{{ toYaml .autoscaling.behavior }}
{{- else -}}
scaleUp:
  stabilizationWindowSeconds: 0
  selectPolicy: Max
  policies:
    - type: Percent
      value: 100
      periodSeconds: 60
    - type: Pods
      value: 2
      periodSeconds: 60
scaleDown:
  stabilizationWindowSeconds: 300
  selectPolicy: Max
  policies:
    - type: Pods
      value: 1
      periodSeconds: 300
{{- end -}}
{{- end -}}

{{/*
The orchestrators' series of this release, of one pool. Their pods are called NAME-HASH-RANDOM; Kubernetes cuts NAME-HASH- to 58
characters, so that of a long name the last dash goes. Takes dict "root" $ "component" c "pool" p.
*/}}
{{- define "specdec.scalingSelector" -}}
{{- $orchestrators := include "specdec.objectName" (dict "root" .root "component" "orchestrator") -}}
namespace="{{ .root.Release.Namespace }}",pod=~"{{ $orchestrators }}-[0-9a-z]+(-[0-9a-z]+)?",pool="{{ .component }}",pool_name="{{ .pool }}"
{{- end -}}

{{/*
One signal of a pool. All orchestrators say the same; one that just started has not heard every replica. No answer is no zero: while no
replica can be reached nobody says anything. Takes dict "root" $ "component" c "pool" p "signal" s.
*/}}
{{- define "specdec.loadQuery" -}}
max(specdec_scaling_load{ {{- include "specdec.scalingSelector" . }},signal="{{ .signal }}"})
{{- end -}}

{{/* 1 while calls wait for a pool that may be at zero, where it has no load. Takes dict "root" $ "component" c "pool" p. */}}
{{- define "specdec.waitingQuery" -}}
clamp_max(sum(specdec_scaling_waiting{ {{- include "specdec.scalingSelector" . }}}), 1)
{{- end -}}

{{/* Takes dict "name" n. */}}
{{- define "specdec.scaleTargetRef" -}}
apiVersion: apps/v1
kind: Deployment
name: {{ .name }}
{{- end -}}

{{/* Metrics of a HorizontalPodAutoscaler. Takes dict "root" $ "component" c ["pool" p] "values" v. */}}
{{- define "specdec.hpaMetrics" -}}
{{- $scaling := .values.autoscaling -}}
{{- if .pool -}}
{{- $labels := dict "pool" .component "pool_name" .pool -}}
{{- range $signal, $threshold := $scaling.thresholds }}
- type: External
  external:
    metric:
      name: {{ $scaling.hpa.metricName | quote }}
      selector:
        matchLabels:
          {{- merge (dict "signal" $signal) $labels ($scaling.hpa.matchLabels | default dict) | toYaml | nindent 10 }}
    target:
      type: AverageValue
      averageValue: {{ round (mulf $threshold 1000) 0 | int }}m
{{- end }}
{{- else -}}
- type: Resource
  resource:
    name: cpu
    target:
      type: Utilization
      averageUtilization: {{ $scaling.targetCPUUtilizationPercentage | int }}
{{- end -}}
{{- end -}}

{{/* One trigger that asks Prometheus. Takes dict "keda" k "query" q "threshold" t. */}}
{{- define "specdec.prometheusTrigger" -}}
- type: prometheus
  metadata:
    serverAddress: {{ .keda.prometheus.serverAddress | quote }}
    query: {{ .query | quote }}
    threshold: {{ .threshold | toString | quote }}
    {{- /* Or an empty answer would be a load of zero. */}}
    ignoreNullValues: "false"
  {{- with .keda.prometheus.authenticationRef }}
  authenticationRef:
    name: {{ . | quote }}
  {{- end }}
{{- end -}}

{{/* Triggers of a ScaledObject. Takes as specdec.hpaMetrics. */}}
{{- define "specdec.kedaTriggers" -}}
{{- $context := . -}}
{{- $scaling := .values.autoscaling -}}
{{- if not .pool -}}
- type: cpu
  metricType: Utilization
  metadata:
    value: {{ $scaling.targetCPUUtilizationPercentage | int | toString | quote }}
{{- else if eq $scaling.keda.trigger "external" -}}
{{- $peers := printf "%s-peers" (include "specdec.objectName" (dict "root" .root "component" "orchestrator")) -}}
{{- /* Pushed where a call may wait for the first replica: it does not wait for the next question as well. */ -}}
- type: {{ ternary "external-push" "external" (eq (int $scaling.minReplicas) 0) }}
  metadata:
    scalerAddress: {{ printf "%s.%s.svc:%s" $peers .root.Release.Namespace (include "specdec.port" "scaler") }}
    pool: {{ .component }}
    poolName: {{ .pool | quote }}
    {{- range $signal, $threshold := $scaling.thresholds }}
    {{ $signal }}: {{ $threshold | toString | quote }}
    {{- end }}
{{- else -}}
{{- range $signal, $threshold := $scaling.thresholds }}
{{- $query := include "specdec.loadQuery" (merge (dict "signal" $signal) $context) }}
{{ include "specdec.prometheusTrigger" (dict "keda" $scaling.keda "query" $query "threshold" $threshold) }}
{{- end }}
{{- if eq (int $scaling.minReplicas) 0 }}
{{ include "specdec.prometheusTrigger" (dict "keda" $scaling.keda "query" (include "specdec.waitingQuery" .) "threshold" 1) }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* The scaler of one workload; nothing where its replicas are fixed. Takes dict "root" $ "component" c ["pool" p]. */}}
{{- define "specdec.scaler" -}}
{{- $root := .root -}}
{{- $values := include "specdec.workloadValues" . | fromJson -}}
{{- $names := dict "root" $root "component" .component "pool" .pool -}}
{{- $context := dict "root" $root "component" .component "pool" .pool "values" $values -}}
{{- $name := include "specdec.objectName" $names -}}
{{- $scaling := $values.autoscaling -}}
{{- if include "specdec.autoscaled" $values }}
{{- $keda := eq $scaling.type "keda" }}
---
apiVersion: {{ ternary "keda.sh/v1alpha1" "autoscaling/v2" $keda }}
kind: {{ ternary "ScaledObject" "HorizontalPodAutoscaler" $keda }}
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels:
    {{- include "specdec.labels" $names | nindent 4 }}
spec:
  scaleTargetRef:
    {{- include "specdec.scaleTargetRef" (dict "name" $name) | nindent 4 }}
  {{- if $keda }}
  minReplicaCount: {{ $scaling.minReplicas | int }}
  maxReplicaCount: {{ $scaling.maxReplicas | int }}
  {{- with $scaling.keda }}
  pollingInterval: {{ .pollingInterval | int }}
  cooldownPeriod: {{ .cooldownPeriod | int }}
  {{- if gt (int .fallback.replicas) 0 }}
  fallback:
    failureThreshold: {{ .fallback.failureThreshold | int }}
    replicas: {{ .fallback.replicas | int }}
  {{- end }}
  {{- end }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- include "specdec.scalingBehavior" $values | nindent 8 }}
  triggers:
    {{- include "specdec.kedaTriggers" $context | trim | nindent 4 }}
  {{- else }}
  minReplicas: {{ $scaling.minReplicas | int }}
  maxReplicas: {{ $scaling.maxReplicas | int }}
  behavior:
    {{- include "specdec.scalingBehavior" $values | nindent 4 }}
  metrics:
    {{- include "specdec.hpaMetrics" $context | trim | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}
