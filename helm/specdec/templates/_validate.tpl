{{/*
Rules between values, which the schema cannot say. Each names the key and the remedy; all that are broken are told at once.
*/}}

{{/* Adds a problem to .found (dict "list"). Takes list found text. */}}
{{- define "specdec.problem" -}}
{{- $found := index . 0 -}}
{{- $_ := set $found "list" (append $found.list (index . 1)) -}}
{{- end -}}

{{/* A quantity of Kubernetes in bytes, or 0 for an empty one. Takes the quantity. */}}
{{- define "specdec.bytes" -}}
{{- $text := toString (. | default 0) -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit | default 1) | int64 -}}
{{- end -}}

{{/* A quantity of Kubernetes as a number: 500m is 0.5. Takes the quantity. */}}
{{- define "specdec.amount" -}}
{{- $text := toString . -}}
{{- $units := dict "m" 0.001 "P" 1e15 "E" 1e18 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- if hasKey $units $unit -}}{{ mulf (trimSuffix $unit $text | float64) (get $units $unit) }}
{{- else if $unit -}}{{ include "specdec.bytes" . }}{{- else -}}{{ $text }}{{- end -}}
{{- end -}}

{{/* Kubernetes refuses a container that asks for more than it may take. Takes dict "found" "key" "resources". */}}
{{- define "specdec.validateResources" -}}
{{- $limits := .resources.limits | default dict -}}
{{- range $name, $asked := .resources.requests | default dict -}}
{{-   $most := get $limits $name -}}
{{-   if and (hasKey $limits $name) (gt (include "specdec.amount" $asked | float64) (include "specdec.amount" $most | float64)) -}}
{{-     include "specdec.problem" (list $.found (printf "%s.limits.%s: %s is less than requests.%s, %s; raise it" $.key $name (toString $most) $name (toString $asked))) -}}
{{-   end -}}
{{- end -}}
{{- end -}}

{{/* A duration in seconds. Takes it as 1h30m, 15s, 500ms. */}}
{{- define "specdec.duration" -}}
{{- $seconds := 0.0 -}}
{{- range regexFindAll "[0-9]+(ms|s|m|h)" . -1 -}}
{{-   $unit := regexFind "[a-z]+$" . -}}
{{-   $seconds = addf $seconds (mulf (trimSuffix $unit . | float64) (get (dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0) $unit)) -}}
{{- end -}}
{{- $seconds -}}
{{- end -}}

{{/* Ends the rendering when problems were found. Takes dict "root" "found". */}}
{{- define "specdec.refuse" -}}
{{- if .found.list -}}
{{-   fail (printf "\n\nvalues of %s that do not fit together:\n  - %s\n" .root.Chart.Name (join "\n  - " (uniq .found.list))) -}}
{{- end -}}
{{- end -}}

{{/* Ends the rendering when a rule is broken. Takes the root. */}}
{{- define "specdec.validate" -}}
{{- $found := dict "list" list -}}
{{- include "specdec.findNulls" (dict "root" . "found" $found) -}}
{{- include "specdec.refuse" (dict "root" . "found" $found) -}}
{{- include "specdec.validateRelease" (dict "root" . "found" $found) -}}
{{- include "specdec.validateSecurity" (dict "root" . "found" $found) -}}
{{- include "specdec.validateWorkload" (dict "root" . "found" $found "component" "orchestrator" "key" "orchestrator" "values" .Values.orchestrator) -}}
{{- range $component := list "target" "draft" -}}
{{-   $named := (get $.Values $component).pools -}}
{{-   range $pool, $values := $named -}}
{{-     range $key := list "pools" "serviceAccount" -}}
{{-       if hasKey ($values | default dict) $key -}}
{{-         include "specdec.problem" (list $found (printf "%s.pools.%s.%s: set %s.%s, which all its pools share" $component $pool $key $component $key)) -}}
{{-       end -}}
{{-     end -}}
{{-   end -}}
{{-   range $pool, $values := include "specdec.pools" (dict "root" $ "component" $component) | fromJson -}}
{{-     $key := ternary $component (printf "%s.pools.%s" $component $pool) (kindIs "invalid" $named) -}}
{{-     $context := dict "root" $ "found" $found "component" $component "key" $key "values" $values -}}
{{-     include "specdec.validateWorkload" $context -}}
{{-     include "specdec.validatePool" $context -}}
{{-   end -}}
{{- end -}}
{{- include "specdec.refuse" (dict "root" . "found" $found) -}}
{{- end -}}

{{/* Takes dict "root" "found". */}}
{{- define "specdec.validateRelease" -}}
{{- $found := .found -}}
{{- $all := .root.Values -}}
{{- $prefix := include "specdec.fullname" .root -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $prefix) -}}
{{-   include "specdec.problem" (list $found (printf "fullnameOverride: %s cannot begin the name of a Service; set one of letters, digits and dashes, a letter first" $prefix)) -}}
{{- end -}}
{{- $targets := include "specdec.pools" (dict "root" .root "component" "target") | fromJson -}}
{{- range $component, $more := dict "target" "extraTargets" "draft" "extraDrafts" -}}
{{-   $names := len (include "specdec.pools" (dict "root" $.root "component" $component) | fromJson) -}}
{{-   range get $all.discovery $more | default list -}}
{{-     if regexMatch "^([^=]*=)?(dns:|kubernetes:)" . -}}{{- $names = add $names 1 -}}{{- end -}}
{{-   end -}}
{{-   if gt (int $names) 16 -}}
{{-     include "specdec.problem" (list $found (printf "discovery.%s: with the pools these are %d names to look up, and an orchestrator takes 16" $more (int $names))) -}}
{{-   end -}}
{{- end -}}
{{- if not (or $targets $all.discovery.extraTargets (include "specdec.poolsAlone" .root)) -}}
{{-   include "specdec.problem" (list $found "target.pools: name at least one pool, or targets elsewhere in discovery.extraTargets; a release of drafts alone has orchestrator.replicas 0") -}}
{{- end -}}
{{- if eq (toString $all.enabled) "false" -}}
{{-   include "specdec.problem" (list $found "enabled: it is for the condition of a chart that depends on this one; uninstall the release, or set it to true") -}}
{{- end -}}
{{- $accounts := dict -}}
{{- range $component := list "orchestrator" "target" "draft" -}}
{{-   if (get $all $component).serviceAccount.create -}}
{{-     $account := include "specdec.serviceAccountName" (dict "root" $.root "component" $component) -}}
{{-     if hasKey $accounts $account -}}
{{-       include "specdec.problem" (list $found (printf "%s.serviceAccount.create: %s is made for %s already; set it to false" $component $account (get $accounts $account))) -}}
{{-     end -}}
{{-     $_ := set $accounts $account $component -}}
{{-   end -}}
{{- end -}}
{{- include "specdec.validateResources" (dict "found" $found "key" "tests.resources" "resources" ($all.tests.resources | default dict)) -}}
{{- $models := list -}}
{{- range $targets -}}
{{-   if eq .model.source "hf" -}}{{- $models = append $models (printf "%s@%s" .model.hf.repository .model.hf.revision) | uniq -}}{{- end -}}
{{- end -}}
{{- if gt (len $models) 1 -}}
{{-   include "specdec.problem" (list $found (printf "target.pools: they serve different models (%s); a release serves one, so set target.model, or install another release" (join ", " $models))) -}}
{{- end -}}
{{- $serves := empty $targets -}}
{{- range $targets -}}
{{-   $serves = or $serves (eq (toJson .model) (toJson $all.target.model)) -}}
{{- end -}}
{{- if not (or $serves $all.orchestrator.tokenizer.source) -}}
{{-   include "specdec.problem" (list $found "orchestrator.tokenizer.source: it follows target.model, which no pool serves; set target.model, or say where the tokenizer is") -}}
{{- end -}}
{{- $config := $all.orchestrator.config -}}
{{- $legal := ternary (list "probabilistic" "greedy") (list "gumbel" "greedy") (eq (toString $config.rejectionSampleMethod) "standard") -}}
{{- if and $config.draftSampleMethod (not (has $config.draftSampleMethod $legal)) -}}
{{-   include "specdec.problem" (list $found (printf "orchestrator.config.draftSampleMethod: with this rejectionSampleMethod it is %s" (join " or " $legal))) -}}
{{- end -}}
{{- if and (has "IPv6" $all.network.ipFamilies) (ne $all.network.listenAddress "::") -}}
{{-   include "specdec.problem" (list $found "network.listenAddress: set it to \"::\", since network.ipFamilies has IPv6") -}}
{{- end -}}
{{- range $key := keys $all.commonLabels -}}
{{-   if has $key (include "specdec.ownLabels" $.root | fromJsonArray) -}}
{{-     include "specdec.problem" (list $found (printf "commonLabels: leave out %s, which the chart sets" $key)) -}}
{{-   end -}}
{{- end -}}
{{- with $all.podMonitor -}}
{{-   if gt (include "specdec.duration" .scrapeTimeout | float64) (include "specdec.duration" .interval | float64) -}}
{{-     include "specdec.problem" (list $found (printf "podMonitor.scrapeTimeout: not more than podMonitor.interval, %s; the operator would leave out the monitor" .interval)) -}}
{{-   end -}}
{{- end -}}
{{- with $all.tls.certManager -}}
{{-   if ge (include "specdec.duration" .renewBefore | float64) (include "specdec.duration" .duration | float64) -}}
{{-     include "specdec.problem" (list $found (printf "tls.certManager.renewBefore: less than tls.certManager.duration, %s" .duration)) -}}
{{-   end -}}
{{- end -}}
{{- if and $all.grpcRoute.enabled (not $all.grpcRoute.parentRefs) -}}
{{-   include "specdec.problem" (list $found "grpcRoute.parentRefs: name a Gateway, or set grpcRoute.enabled to false") -}}
{{- end -}}
{{- end -}}

{{/* Labels that selectors or everybody's tools rely on, as JSON. */}}
{{- define "specdec.ownLabels" -}}
{{- $ours := list "specdec.io/pool" "helm.sh/chart" -}}
{{- range list "name" "instance" "component" "version" "managed-by" -}}{{- $ours = append $ours (printf "app.kubernetes.io/%s" .) -}}{{- end -}}
{{- $ours | toJson -}}
{{- end -}}

{{/* Takes dict "root" "found". */}}
{{- define "specdec.validateSecurity" -}}
{{- $found := .found -}}
{{- $front := .root.Values.tls.front -}}
{{- $internal := .root.Values.tls.internal -}}
{{- $auth := .root.Values.auth -}}
{{- if $front.enabled -}}
{{-   if and $front.existingSecret $front.issuerRef.name -}}
{{-     include "specdec.problem" (list $found "tls.front: set either existingSecret or issuerRef") -}}
{{-   else if not (or $front.existingSecret $front.issuerRef.name) -}}
{{-     include "specdec.problem" (list $found "tls.front.existingSecret: name a Secret with tls.crt and tls.key, or an issuer of cert-manager in tls.front.issuerRef.name") -}}
{{-   end -}}
{{- else if $front.clientCertificates -}}
{{-   include "specdec.problem" (list $found "tls.front.clientCertificates: certificates need TLS; set tls.front.enabled") -}}
{{- end -}}
{{- if and $front.allowedIdentities (not $front.clientCertificates) -}}
{{-   include "specdec.problem" (list $found "tls.front.allowedIdentities: they are names in certificates; set tls.front.clientCertificates") -}}
{{- end -}}
{{- if $internal.enabled -}}
{{-   if and $internal.issuerRef.name (or $internal.orchestratorSecret $internal.poolsSecret) -}}
{{-     include "specdec.problem" (list $found "tls.internal: set either orchestratorSecret and poolsSecret, or issuerRef") -}}
{{-   else if not (or $internal.issuerRef.name (and $internal.orchestratorSecret $internal.poolsSecret)) -}}
{{-     include "specdec.problem" (list $found "tls.internal: name Secrets with tls.crt, tls.key and ca.crt in orchestratorSecret and poolsSecret, or an issuer of cert-manager in issuerRef.name") -}}
{{-   end -}}
{{- end -}}
{{- if and $auth.existingSecret (not $front.enabled) (not $auth.allowInsecure) -}}
{{-   include "specdec.problem" (list $found "auth.existingSecret: tokens without TLS can be read on the way; set tls.front.enabled, or auth.allowInsecure where something in front speaks TLS") -}}
{{- end -}}
{{- end -}}

{{/* What holds for every workload. Takes dict "root" "found" "component" "key" "values". */}}
{{- define "specdec.validateWorkload" -}}
{{- $found := .found -}}
{{- $key := .key -}}
{{- $values := .values -}}
{{- $needed := include "specdec.gracePeriodNeeded" $values | int -}}
{{- $grace := $values.terminationGracePeriodSeconds | int -}}
{{- if and $grace (lt $grace $needed) -}}
{{-   include "specdec.problem" (list $found (printf "%s.terminationGracePeriodSeconds: %d cuts off what runs; 0 (computed) or at least %d = preStopSeconds + config.preDrainMs + config.drainMs + 6 s" $key $grace $needed)) -}}
{{- end -}}
{{- $deadline := $values.progressDeadlineSeconds | int -}}
{{- if and $deadline (le $deadline (add $values.loadSeconds $values.minReadySeconds | int)) -}}
{{-   include "specdec.problem" (list $found (printf "%s.progressDeadlineSeconds: a start may take loadSeconds, and minReadySeconds follow; 0 (computed) or more than both" $key)) -}}
{{- end -}}
{{- with $values.probes.readiness -}}
{{-   $blind := add (mul .periodSeconds .failureThreshold) .timeoutSeconds -}}
{{-   if ge (int $blind) 60 -}}
{{-     include "specdec.problem" (list $found (printf "%s.probes.readiness: a broken replica would get calls for %d s; periodSeconds times failureThreshold + timeoutSeconds must be less than 60" $key $blind)) -}}
{{-   end -}}
{{- end -}}
{{- range $name, $probe := $values.probes -}}
{{-   if gt (int $probe.timeoutSeconds) (int $probe.periodSeconds) -}}
{{-     include "specdec.problem" (list $found (printf "%s.probes.%s.timeoutSeconds: not more than periodSeconds, %d" $key $name (int $probe.periodSeconds))) -}}
{{-   end -}}
{{- end -}}
{{- include "specdec.validateCounts" . -}}
{{- include "specdec.validateResources" (dict "found" $found "key" (printf "%s.resources" $key) "resources" $values.resources) -}}
{{- range $values.extraEnv -}}
{{-   if hasPrefix "SPECDEC_" .name -}}
{{-     include "specdec.problem" (list $found (printf "%s.extraEnv: %s is a setting; use %s.config, or the key that decides it" $key .name $key)) -}}
{{-   else if has .name (list "HF_HUB_OFFLINE" "HOME") -}}
{{-     include "specdec.problem" (list $found (printf "%s.extraEnv: leave out %s, which the chart sets" $key .name)) -}}
{{-   end -}}
{{- end -}}
{{- range $values.extraVolumes -}}
{{-   if has .name (list "tmp" "model" "shm" "front" "internal" "auth") -}}
{{-     include "specdec.problem" (list $found (printf "%s.extraVolumes: call %s something else, the chart has a volume of that name" $key .name)) -}}
{{-   end -}}
{{- end -}}
{{- range concat ($values.initContainers | default list) ($values.extraContainers | default list) -}}
{{-   if has .name (list $.component "download") -}}
{{-     include "specdec.problem" (list $found (printf "%s.extraContainers, initContainers: call %s something else, the chart has a container of that name" $key .name)) -}}
{{-   end -}}
{{- end -}}
{{- range $label := keys $values.podLabels -}}
{{-   if has $label (concat (include "specdec.ownLabels" $.root | fromJsonArray) (keys $.root.Values.commonLabels)) -}}
{{-     include "specdec.problem" (list $found (printf "%s.podLabels: leave out %s, which the chart sets" $key $label)) -}}
{{-   end -}}
{{- end -}}
{{- if eq .component "orchestrator" -}}
{{-   if $values.tokenizer.source -}}
{{-     include "specdec.validateModel" (dict "root" .root "found" $found "key" (printf "%s.tokenizer" $key) "model" $values.tokenizer) -}}
{{-   else -}}
{{-     include "specdec.validateModel" (dict "root" .root "found" $found "key" "target.model" "model" .root.Values.target.model) -}}
{{-   end -}}
{{- else -}}
{{-   include "specdec.validateModel" (dict "root" .root "found" $found "key" (printf "%s.model" $key) "model" $values.model) -}}
{{- end -}}
{{- end -}}

{{/* Replicas, autoscaling and the budget. Takes as specdec.validateWorkload. */}}
{{- define "specdec.validateCounts" -}}
{{- $found := .found -}}
{{- $key := .key -}}
{{- $values := .values -}}
{{- $scaling := $values.autoscaling -}}
{{- $fewest := int $values.replicas -}}
{{- if include "specdec.autoscaled" $values -}}
{{-   $fewest = int $scaling.minReplicas -}}
{{-   if gt $fewest (int $scaling.maxReplicas) -}}
{{-     include "specdec.problem" (list $found (printf "%s.autoscaling.minReplicas: %d is more than maxReplicas, %d" $key $fewest (int $scaling.maxReplicas))) -}}
{{-   end -}}
{{-   if and (eq $fewest 0) (eq $scaling.type "hpa") -}}
{{-     include "specdec.problem" (list $found (printf "%s.autoscaling.minReplicas: an HPA keeps at least 1; set autoscaling.type to keda, or minReplicas to 1" $key)) -}}
{{-   end -}}
{{-   if and (ne .component "orchestrator") (not $scaling.thresholds) -}}
{{-     include "specdec.problem" (list $found (printf "%s.autoscaling.thresholds: name one signal at least, or set autoscaling.type to none" $key)) -}}
{{-   end -}}
{{-   if and (ne .component "orchestrator") (include "specdec.poolsAlone" .root) -}}
{{-     include "specdec.problem" (list $found (printf "%s.autoscaling.type: the release's own orchestrators tell loads, and orchestrator.replicas is 0; set it to none" $key)) -}}
{{-   end -}}
{{-   if and (eq .component "orchestrator") (not ($values.resources.requests | default dict).cpu) -}}
{{-     include "specdec.problem" (list $found "orchestrator.resources.requests.cpu: autoscaling measures CPU against it; set it") -}}
{{-   end -}}
{{-   if and $scaling.keda (eq $scaling.type "keda") -}}
{{-     if and (eq $scaling.keda.trigger "prometheus") (not $scaling.keda.prometheus.serverAddress) -}}
{{-       include "specdec.problem" (list $found (printf "%s.autoscaling.keda.prometheus.serverAddress: name Prometheus' address, or set trigger to external" $key)) -}}
{{-     end -}}
{{-     $fallback := int $scaling.keda.fallback.replicas -}}
{{-     if and $fallback (or (gt $fallback (int $scaling.maxReplicas)) (lt $fallback $fewest)) -}}
{{-       include "specdec.problem" (list $found (printf "%s.autoscaling.keda.fallback.replicas: between minReplicas, %d, and maxReplicas, %d; 0 = no fallback" $key $fewest (int $scaling.maxReplicas))) -}}
{{-     end -}}
{{-   end -}}
{{- end -}}
{{- with $values.podDisruptionBudget -}}
{{-   $most := toString .maxUnavailable -}}
{{-   $least := toString .minAvailable -}}
{{-   if and .enabled (eq $least "") (has $most (list "" "0" "0%")) -}}
{{-     include "specdec.problem" (list $found (printf "%s.podDisruptionBudget.maxUnavailable: nodes could never be drained; at least 1, or enabled: false" $key)) -}}
{{-   end -}}
{{-   $blocks := and (not (kindIs "string" .minAvailable)) (ge (int .minAvailable) (max $fewest 1)) -}}
{{-   if and .enabled (gt $fewest 1) (or (eq $least "100%") $blocks) -}}
{{-     include "specdec.problem" (list $found (printf "%s.podDisruptionBudget.minAvailable: with %d replicas nodes could never be drained; fewer than that" $key $fewest)) -}}
{{-   end -}}
{{- end -}}
{{- end -}}

{{/* Takes dict "root" "found" "key" "model". */}}
{{- define "specdec.validateModel" -}}
{{- $found := .found -}}
{{- $key := .key -}}
{{- with .model -}}
{{-   if and (eq .source "pvc") (not .pvc.claimName) -}}
{{-     include "specdec.problem" (list $found (printf "%s.pvc.claimName: name the claim that holds the files" $key)) -}}
{{-   else if and (eq .source "hostPath") (not .hostPath.path) -}}
{{-     include "specdec.problem" (list $found (printf "%s.hostPath.path: name the folder" $key)) -}}
{{-   else if and (eq .source "hf") (not .hf.repository) -}}
{{-     include "specdec.problem" (list $found (printf "%s.hf.repository: name the repository, OWNER/NAME" $key)) -}}
{{-   else if and (eq .source "image") (not .image.reference) -}}
{{-     include "specdec.problem" (list $found (printf "%s.image.reference: name the image" $key)) -}}
{{-   else if and (eq .source "image") (semverCompare "<1.31.0-0" $.root.Capabilities.KubeVersion.Version) -}}
{{-     include "specdec.problem" (list $found (printf "%s.source: image volumes need Kubernetes 1.31 or newer, and this is %s; use pvc, hostPath or hf" $key $.root.Capabilities.KubeVersion.Version)) -}}
{{-   else if not .source -}}
{{-     include "specdec.problem" (list $found (printf "%s.source: set it to pvc, hostPath, hf or image" $key)) -}}
{{-   end -}}
{{- end -}}
{{- end -}}

{{/* What holds for targets and drafts. Takes as specdec.validateWorkload. */}}
{{- define "specdec.validatePool" -}}
{{- $found := .found -}}
{{- $key := .key -}}
{{- $values := .values -}}
{{- $limits := $values.resources.limits | default dict -}}
{{- if gt (int $values.gpu.count) 0 -}}
{{-   if has (toString $values.config.dtype) (list "int4" "int8") -}}
{{-     include "specdec.problem" (list $found (printf "%s.config.dtype: %s runs on CPUs only; bfloat16, float32 or float64, or set gpu.count to 0" $key $values.config.dtype)) -}}
{{-   end -}}
{{-   range list "limits" "requests" -}}
{{-     if hasKey (get $values.resources . | default dict) $values.gpu.resourceName -}}
{{-       include "specdec.problem" (list $found (printf "%s.resources.%s: leave out %s, which gpu.count sets" $key . $values.gpu.resourceName)) -}}
{{-     end -}}
{{-   end -}}
{{- end -}}
{{- if and $values.zones $values.affinity.nodeAffinity -}}
{{-   include "specdec.problem" (list $found (printf "%s.zones: set either zones or affinity.nodeAffinity" $key)) -}}
{{- end -}}
{{- $memory := include "specdec.bytes" $limits.memory | int64 -}}
{{- $shared := include "specdec.bytes" $values.shm.sizeLimit | int64 -}}
{{- if and $memory (gt (mul 2 $shared) $memory) -}}
{{-   include "specdec.problem" (list $found (printf "%s.shm.sizeLimit: %s counts against resources.limits.memory, %s, and may be half of it; raise the limit" $key $values.shm.sizeLimit (toString $limits.memory))) -}}
{{- end -}}
{{- $rows := $values.config.maxStepRows | default 64 | int -}}
{{- $block := ternary ($values.config.maxNumSpeculativeTokens | int) 16 (hasKey $values.config "maxNumSpeculativeTokens") -}}
{{- if and (eq .component "target") (le $rows $block) -}}
{{-   include "specdec.problem" (list $found (printf "%s.config.maxStepRows: %d must be more than maxNumSpeculativeTokens, %d" $key $rows $block)) -}}
{{- end -}}
{{- end -}}
