{{/* Names, labels, images and values that every template uses. Each define says what it takes. */}}

{{/* Chart's name for labels. Takes the root. */}}
{{- define "specdec.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/*
Prefix of every object's name, at most 35 characters: `<prefix>-target-<pool of 20>` is a Service's name and a label's value, which
end at 63. A longer one is cut and keeps a hash, so that two long names do not become one. Takes the root.
*/}}
{{- define "specdec.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{-   $chart := default .Chart.Name .Values.nameOverride -}}
{{-   $name = ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- end -}}
{{- if gt (len $name) 35 -}}
{{-   printf "%s-%s" ($name | trunc 28 | trimSuffix "-") (sha256sum $name | trunc 6) -}}
{{- else -}}
{{-   $name -}}
{{- end -}}
{{- end -}}

{{/* <fullname>-<component>[-<pool>]. Takes dict "root" $ "component" c ["pool" p]. */}}
{{- define "specdec.objectName" -}}
{{- list (include "specdec.fullname" .root) .component .pool | compact | join "-" -}}
{{- end -}}

{{/* Takes dict "root" $ "component" c ["pool" p]; component may be "". */}}
{{- define "specdec.selectorLabels" -}}
app.kubernetes.io/name: {{ include "specdec.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .pool }}
specdec.io/pool: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Takes dict "root" $ "component" c ["pool" p]; component may be "". */}}
{{- define "specdec.labels" -}}
{{ include "specdec.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of pods: without the chart's version, which alone is no reason to load a model again. Takes as specdec.labels. */}}
{{- define "specdec.podLabels" -}}
{{ include "specdec.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The number of a port. Takes a component's name, or metrics, health, scaler. */}}
{{- define "specdec.port" -}}
{{- get (dict "orchestrator" 50051 "target" 50052 "draft" 50053 "metrics" 9464 "health" 50050 "scaler" 50054) . -}}
{{- end -}}

{{/* The full name of a component's gRPC service, which health answers for, too. Takes the component's name. */}}
{{- define "specdec.grpcService" -}}
{{- get (dict "orchestrator" "specdec.v1.GenerationService" "target" "specdec.v1.TargetService" "draft" "specdec.v1.DraftService") . -}}
{{- end -}}

{{/*
The pools of targets or drafts with all that holds for each, as JSON: name to values, the component's with the pool's over them. Maps are
merged, lists replaced; null leaves out a pool that another file of values names. `pools` unset (null) is one pool called default, {} is none: helm merges a user's map into the chart's, so that a
pool in values.yaml could hardly be got rid of. Takes dict "root" $ "component" c. Read it with fromJson.
*/}}
{{- define "specdec.pools" -}}
{{- $component := get .root.Values .component -}}
{{- $pools := dict -}}
{{- $named := $component.pools -}}
{{- if kindIs "invalid" $named -}}
{{-   $named = dict "default" dict -}}
{{- end -}}
{{- range $pool, $values := $named -}}
{{-   if not (kindIs "invalid" $values) -}}
{{-     $_ := set $pools $pool (mergeOverwrite (omit (deepCopy $component) "pools") (deepCopy $values)) -}}
{{-   end -}}
{{- end -}}
{{- $pools | toJson -}}
{{- end -}}

{{/* What holds for one workload, as JSON. Takes dict "root" $ "component" c ["pool" p]. Read it with fromJson. */}}
{{- define "specdec.workloadValues" -}}
{{- if .pool -}}
{{-   get (include "specdec.pools" . | fromJson) .pool | toJson -}}
{{- else -}}
{{-   get .root.Values .component | toJson -}}
{{- end -}}
{{- end -}}

{{/* Takes dict "root" $ "component" c. */}}
{{- define "specdec.serviceAccountName" -}}
{{- $account := (get .root.Values .component).serviceAccount -}}
{{- if $account.create -}}
{{- $account.name | default (include "specdec.objectName" (dict "root" .root "component" .component)) -}}
{{- else -}}
{{- $account.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/*
The image of a workload: registry/repository:tag@digest. The orchestrator's has no model code, the pools' has; a workload's own
`image` is laid over that. Takes dict "root" $ "component" c "image" (the workload's own image values).
*/}}
{{- define "specdec.image" -}}
{{- $all := .root.Values -}}
{{- $default := ternary $all.image.slim $all.image.model (eq .component "orchestrator") -}}
{{- $image := mergeOverwrite (deepCopy $default) (deepCopy (.image | default dict)) -}}
{{- $registry := $all.global.imageRegistry | default $image.registry -}}
{{- $name := list $registry $image.repository | compact | join "/" -}}
{{- if $image.digest -}}
{{- /* With a digest the tag only tells people what it is. */ -}}
{{- printf "%s%s@%s" $name (ternary (printf ":%s" $image.tag) "" (not (empty $image.tag))) $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name ($image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* Takes as specdec.image. */}}
{{- define "specdec.imagePullPolicy" -}}
{{- $all := .root.Values -}}
{{- $default := ternary $all.image.slim $all.image.model (eq .component "orchestrator") -}}
{{- (.image | default dict).pullPolicy | default $default.pullPolicy -}}
{{- end -}}

{{/* imagePullSecrets of a pod, or nothing. Takes the root. */}}
{{- define "specdec.imagePullSecrets" -}}
{{- $secrets := concat (.Values.global.imagePullSecrets | default list) (.Values.imagePullSecrets | default list) -}}
{{- if $secrets -}}
imagePullSecrets:
  {{- range $secrets | uniq }}
  - name: {{ . | quote }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/*
A number of milliseconds from a config, or the service's own default where the key was set to null; 0 stays 0.
Takes dict "config" c "key" k "default" d.
*/}}
{{- define "specdec.milliseconds" -}}
{{- if kindIs "invalid" (get .config .key) -}}{{ .default }}{{- else if eq (toString (get .config .key)) "" -}}{{ .default }}
{{- else -}}{{ get .config .key | int64 }}{{- end -}}
{{- end -}}

{{/*
Seconds from SIGTERM to SIGKILL that a workload needs: docs/operations.md, "Stopping". The kubelet counts the preStop hook, too.
Takes the workload's values.
*/}}
{{- define "specdec.gracePeriodNeeded" -}}
{{- $before := include "specdec.milliseconds" (dict "config" .config "key" "preDrainMs" "default" 300) | int64 -}}
{{- $drain := include "specdec.milliseconds" (dict "config" .config "key" "drainMs" "default" 10000) | int64 -}}
{{- add (.preStopSeconds | int64) (divf (addf $before $drain) 1000 | ceil | int64) 6 -}}
{{- end -}}

{{/* "true" where the number of replicas is somebody else's to set. Takes the workload's values. */}}
{{- define "specdec.autoscaled" -}}
{{- if ne .autoscaling.type "none" -}}true{{- end -}}
{{- end -}}

{{/*
Where the orchestrator finds a pool's replicas, comma separated, each entry with its pool's name in front. Takes dict "root" $ "component" c.
A short name is enough: pools live in the release's namespace, and the search list of a pod begins there.
*/}}
{{- define "specdec.entries" -}}
{{- $root := .root -}}
{{- $component := .component -}}
{{- $entries := list -}}
{{- range $pool, $_ := include "specdec.pools" . | fromJson -}}
{{-   $service := include "specdec.objectName" (dict "root" $root "component" $component "pool" $pool) -}}
{{-   if eq $root.Values.discovery.type "kubernetes" -}}
{{-     $entries = append $entries (printf "%s=kubernetes:///%s:grpc" $pool $service) -}}
{{-   else -}}
{{-     $entries = append $entries (printf "%s=dns:///%s:%s" $pool $service (include "specdec.port" $component)) -}}
{{-   end -}}
{{- end -}}
{{- $more := ternary $root.Values.discovery.extraTargets $root.Values.discovery.extraDrafts (eq $component "target") -}}
{{- concat $entries ($more | default list) | join "," -}}
{{- end -}}

{{/* "true" of a release of pools alone, for the orchestrators of others: orchestrator.replicas is 0. Takes the root. */}}
{{- define "specdec.poolsAlone" -}}
{{- with .Values.orchestrator -}}
{{- if and (eq .autoscaling.type "none") (eq (int .replicas) 0) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* "true" when some workload scales through KEDA's external scaler, which the orchestrators then serve. Takes the root. */}}
{{- define "specdec.externalScaler" -}}
{{- $root := . -}}
{{- $found := "" -}}
{{- range $component := list "target" "draft" -}}
{{-   range $pool, $values := include "specdec.pools" (dict "root" $root "component" $component) | fromJson -}}
{{-     if and (eq $values.autoscaling.type "keda") (eq $values.autoscaling.keda.trigger "external") -}}
{{-       $found = "true" -}}
{{-     end -}}
{{-   end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* The orchestrators one by one, by the scaler's port, as SPECDEC_PEERS takes them. Takes the root. */}}
{{- define "specdec.peers" -}}
{{- $service := printf "%s-peers" (include "specdec.objectName" (dict "root" . "component" "orchestrator")) -}}
{{- if eq .Values.discovery.type "kubernetes" -}}
{{- printf "kubernetes:///%s:scaler" $service -}}
{{- else -}}
{{- printf "dns:///%s:%s" $service (include "specdec.port" "scaler") -}}
{{- end -}}
{{- end -}}
