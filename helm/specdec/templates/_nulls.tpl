{{/*
Keys that templates count on, by the key that holds them. helm takes a key away whose value is null, and its default with it: what
comes then is a template's error at best, and no replicas at worst.
*/}}
{{- define "specdec.neededOfRelease" -}}
"": [global, commonLabels, image, network, discovery, networkPolicy, grpcRoute, auth, tls, podSecurityContext, containerSecurityContext, tmp,
  telemetry, podMonitor, alerts, dashboards, orchestrator, target, draft, tests]
image: [slim, model]
image.slim: [repository, pullPolicy]
image.model: [repository, pullPolicy]
network: [listenAddress]
discovery: [type]
networkPolicy: [enabled, egress]
networkPolicy.egress: [restrict]
auth: [existingSecretKey]
tls: [certManager, front, internal]
tls.certManager: [duration, renewBefore]
tls.front: [enabled, issuerRef]
tls.internal: [enabled, issuerRef]
tmp: [sizeLimit]
podMonitor: [enabled, interval, scrapeTimeout]
alerts: [enabled]
dashboards: [enabled]
tests: [enabled, timeoutSeconds, prompt, maxTokens, tokenSecretKey]
orchestrator: [tokenizer, service]
orchestrator.tokenizer: [hf]
orchestrator.service: [type, port, externalTrafficPolicy]
{{- end -}}
{{- define "specdec.neededOfWorkload" -}}
"": [config, autoscaling, resources, affinity, probes, podDisruptionBudget, podLabels, replicas, loadSeconds, minReadySeconds, preStopSeconds,
  serviceAccount]
autoscaling: [type, minReplicas, maxReplicas]
probes: [startup, liveness, readiness]
probes.startup: [periodSeconds, timeoutSeconds]
probes.liveness: [periodSeconds, timeoutSeconds, failureThreshold]
probes.readiness: [periodSeconds, timeoutSeconds, failureThreshold]
podDisruptionBudget: [enabled, unhealthyPodEvictionPolicy]
serviceAccount: [create]
{{- end -}}
{{- define "specdec.neededOfPool" -}}
"": [model, gpu, shm]
model: [source, pvc, hostPath, hf, image]
model.hf: [repository, existingSecretKey, allowPatterns]
gpu: [count, resourceName]
autoscaling: [thresholds, hpa, keda]
autoscaling.hpa: [metricName]
autoscaling.keda: [trigger, pollingInterval, cooldownPeriod, fallback, prometheus]
autoscaling.keda.fallback: [failureThreshold, replicas]
{{- end -}}

{{/* Problems for those that are null. Takes dict "found" "key" k (that of the values, "" = all) "values" v "needed" map. */}}
{{- define "specdec.findNullsIn" -}}
{{- range $path, $keys := .needed -}}
{{-   $at := $.values -}}
{{-   range splitList "." $path -}}
{{-     if and . (kindIs "map" $at) -}}{{- $at = get $at . -}}{{- end -}}
{{-   end -}}
{{-   if kindIs "map" $at -}}
{{-     range $key := $keys -}}
{{-       if or (not (hasKey $at $key)) (kindIs "invalid" (get $at $key)) -}}
{{-         $name := list $.key $path $key | compact | join "." -}}
{{-         include "specdec.problem" (list $.found (printf "%s: it may not be null; leave it out for its default" $name)) -}}
{{-       end -}}
{{-     end -}}
{{-   end -}}
{{- end -}}
{{- end -}}

{{/* Takes dict "root" "found". */}}
{{- define "specdec.findNulls" -}}
{{- $found := .found -}}
{{- $all := .root.Values -}}
{{- include "specdec.findNullsIn" (dict "found" $found "key" "" "values" $all "needed" (include "specdec.neededOfRelease" . | fromYaml)) -}}
{{- range $component := list "orchestrator" "target" "draft" -}}
{{-   $sets := list "specdec.neededOfWorkload" -}}
{{-   if ne $component "orchestrator" -}}{{- $sets = append $sets "specdec.neededOfPool" -}}{{- end -}}
{{-   range $sets -}}
{{-     include "specdec.findNullsIn" (dict "found" $found "key" $component "values" (get $all $component) "needed" (include . $ | fromYaml)) -}}
{{-   end -}}
{{- end -}}
{{- end -}}
