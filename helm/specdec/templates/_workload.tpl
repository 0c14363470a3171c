{{/*
The one workload: Deployment, headless Service of a pool, budget. Orchestrator, target and draft are all made here, so that none
lacks what another has. Takes dict "root" $ "component" c ["pool" p].
*/}}
{{- define "specdec.workload" -}}
{{- $root := .root -}}
{{- $values := include "specdec.workloadValues" . | fromJson -}}
{{- $names := dict "root" $root "component" .component "pool" .pool -}}
{{- $model := include "specdec.model" (dict "root" $root "component" .component "values" $values) | fromJson -}}
{{- $context := dict "root" $root "component" .component "pool" .pool "values" $values "model" $model -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "specdec.objectName" $names }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels:
    {{- include "specdec.labels" $names | nindent 4 }}
spec:
  {{- /* Whoever scales owns this field: helm 4 applies server-side, and two owners are a conflict. */}}
  {{- if not (include "specdec.autoscaled" $values) }}
  replicas: {{ $values.replicas | int }}
  {{- end }}
  revisionHistoryLimit: 3
  minReadySeconds: {{ $values.minReadySeconds | int }}
  progressDeadlineSeconds: {{ include "specdec.progressDeadline" (dict "root" $root "component" .component "values" $values) }}
  strategy:
    {{- include "specdec.updateStrategy" $context | nindent 4 }}
  selector:
    matchLabels:
      {{- include "specdec.selectorLabels" $names | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "specdec.podLabels" $names | nindent 8 }}
        {{- with $values.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with include "specdec.podAnnotations" $context | trim }}
      annotations:
        {{- . | nindent 8 }}
      {{- end }}
    spec:
      {{- include "specdec.pod" $context | nindent 6 }}
{{- include "specdec.disruptionBudget" $context }}
{{- end -}}

{{/*
Seconds after which a rollout counts as failed. An orchestrator is ready once a target is, so it gets what targets get as well.
Takes dict "root" "component" "values".
*/}}
{{- define "specdec.progressDeadline" -}}
{{- $first := 600 -}}
{{- if eq .component "orchestrator" -}}
{{-   range $pool, $values := include "specdec.pools" (dict "root" .root "component" "target") | fromJson -}}
{{-     $first = max $first (include "specdec.progressDeadline" (dict "root" $.root "component" "target" "values" $values) | int) -}}
{{-   end -}}
{{- end -}}
{{- .values.progressDeadlineSeconds | int | default (add (.values.loadSeconds | int) $first) -}}
{{- end -}}

{{/* Takes the context. */}}
{{- define "specdec.updateStrategy" -}}
{{- if .values.updateStrategy -}}
{{- toYaml .values.updateStrategy -}}
{{- else -}}
type: RollingUpdate
rollingUpdate:
  {{- if and .pool (gt (int .values.gpu.count) 0) }}
  {{- /* A surge pod would wait for the GPU of the one that it replaces, for ever where all are taken. */}}
  maxSurge: 0
  maxUnavailable: 1
  {{- else }}
  maxSurge: 1
  maxUnavailable: 0
  {{- end }}
{{- end -}}
{{- end -}}

{{/*
Files that services read again by themselves (certificates, tokens) need no restart; what extraObjects hold may be read at start only.
Takes the context.
*/}}
{{- define "specdec.podAnnotations" -}}
{{- with .root.Values.extraObjects }}
checksum/extra-objects: {{ toJson . | sha256sum }}
{{- end }}
{{- with .values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes the context. */}}
{{- define "specdec.pod" -}}
{{- $values := .values -}}
{{- $root := .root -}}
{{- $watches := and (eq .component "orchestrator") (eq (include "specdec.watches" $root) "true") -}}
serviceAccountName: {{ include "specdec.serviceAccountName" . | quote }}
{{- /* Nobody but an orchestrator that watches EndpointSlices talks to the API. */}}
automountServiceAccountToken: {{ $watches }}
{{- /* Services of a release called specdec would otherwise arrive as SPECDEC_… variables. */}}
enableServiceLinks: false
{{- with include "specdec.imagePullSecrets" $root }}
{{ . }}
{{- end }}
terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds | int | default (include "specdec.gracePeriodNeeded" $values | int) }}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- include "specdec.scheduling" . }}
{{- $downloads := eq .model.source "hf" }}
{{- if or $downloads $values.initContainers }}
initContainers:
  {{- with $values.initContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if $downloads }}
  {{- include "specdec.modelDownload" . | nindent 2 }}
  {{- end }}
{{- end }}
containers:
  - name: {{ .component }}
    {{- include "specdec.container" . | nindent 4 }}
  {{- with $values.extraContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumes:
  {{- include "specdec.volumes" . | nindent 2 }}
{{- end -}}

{{/* Takes the context. */}}
{{- define "specdec.container" -}}
{{- $values := .values -}}
image: {{ include "specdec.image" (dict "root" .root "component" .component "image" $values.image) }}
imagePullPolicy: {{ include "specdec.imagePullPolicy" (dict "root" .root "component" .component "image" $values.image) }}
{{- /* No shell in between: the service is the process that hears SIGTERM. */}}
command: [python, -m, {{ ternary "orchestrator" (printf "%s_service" .component) (eq .component "orchestrator") }}]
env:
  {{- include "specdec.env" . | nindent 2 }}
ports:
  - name: grpc
    containerPort: {{ include "specdec.port" .component }}
  - name: metrics
    containerPort: {{ include "specdec.port" "metrics" }}
  - name: health
    containerPort: {{ include "specdec.port" "health" }}
  {{- if and (eq .component "orchestrator") (include "specdec.externalScaler" .root) }}
  - name: scaler
    containerPort: {{ include "specdec.port" "scaler" }}
  {{- end }}
{{- include "specdec.probes" . }}
{{- with $values.preStopSeconds | int }}
lifecycle:
  preStop:
    {{- if semverCompare ">=1.30.0-0" $.root.Capabilities.KubeVersion.Version }}
    sleep:
      seconds: {{ . }}
    {{- else }}
    exec:
      command: [python, -c, "import time; time.sleep({{ . }})"]
    {{- end }}
{{- end }}
resources:
  {{- include "specdec.resources" $values | nindent 2 }}
securityContext:
  {{- toYaml .root.Values.containerSecurityContext | nindent 2 }}
volumeMounts:
  {{- include "specdec.volumeMounts" . | nindent 2 }}
{{- end -}}

{{/*
Three questions with three names: `liveness` stays on while a model loads and while the process stops, `readiness` does not, and the
gRPC service's own name comes on once the start is over. Takes the context.
*/}}
{{- define "specdec.probes" -}}
{{- $health := include "specdec.port" "health" -}}
{{- with .values.probes }}
startupProbe:
  grpc:
    port: {{ $health }}
    service: {{ include "specdec.grpcService" $.component }}
  periodSeconds: {{ .startup.periodSeconds | int }}
  timeoutSeconds: {{ .startup.timeoutSeconds | int }}
  failureThreshold: {{ divf $.values.loadSeconds .startup.periodSeconds | ceil | int }}
livenessProbe:
  grpc:
    port: {{ $health }}
    service: liveness
  periodSeconds: {{ .liveness.periodSeconds | int }}
  timeoutSeconds: {{ .liveness.timeoutSeconds | int }}
  failureThreshold: {{ .liveness.failureThreshold | int }}
readinessProbe:
  grpc:
    port: {{ $health }}
    service: {{ include "specdec.readinessName" $ }}
  periodSeconds: {{ .readiness.periodSeconds | int }}
  timeoutSeconds: {{ .readiness.timeoutSeconds | int }}
  failureThreshold: {{ .readiness.failureThreshold | int }}
{{- end }}
{{- end -}}

{{/*
`readiness` of an orchestrator goes off while no target is there. Where every pool of targets may shrink to none, that would keep out
the very calls that make one grow: the orchestrators then count as ready as soon as they take calls. Takes the context.
*/}}
{{- define "specdec.readinessName" -}}
{{- $name := "readiness" -}}
{{- if eq .component "orchestrator" -}}
{{-   $stays := not (empty .root.Values.discovery.extraTargets) -}}
{{-   range $pool, $values := include "specdec.pools" (dict "root" .root "component" "target") | fromJson -}}
{{-     $stays = or $stays (not (and (include "specdec.autoscaled" $values) (eq (int $values.autoscaling.minReplicas) 0))) -}}
{{-   end -}}
{{-   $name = ternary $name (include "specdec.grpcService" .component) $stays -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Extended resources such as GPUs are limits; requests follow them. Takes the workload's values. */}}
{{- define "specdec.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if and .gpu (gt (int (.gpu | default dict).count) 0) -}}
{{-   $_ := set $resources "limits" (merge (dict .gpu.resourceName (int .gpu.count)) ($resources.limits | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
