{{/* Flags by which a command of ours reaches the orchestrators of this release, each with a space in front. Takes the root. */}}
{{- define "specdec.callersFlags" -}}
{{- if .Values.tls.front.enabled }} --tls-ca ca.crt --tls-server-name {{ include "specdec.objectName" (dict "root" . "component" "orchestrator") }}{{ end }}
{{- if .Values.tls.front.clientCertificates }} --tls-cert tls.crt --tls-key tls.key{{ end }}
{{- if .Values.auth.existingSecret }} --token-file token{{ end }}
{{- end -}}

{{/* What is allowed and perhaps not meant, a line each. Takes the root. */}}
{{- define "specdec.warnings" -}}
{{- $all := .Values -}}
{{- $targets := include "specdec.pools" (dict "root" . "component" "target") | fromJson -}}
{{- $drafts := include "specdec.pools" (dict "root" . "component" "draft") | fromJson -}}
{{- $told := list -}}
{{- if not (or $drafts $all.discovery.extraDrafts) -}}
{{-   $told = append $told "no draft pool: targets decide alone, apart from prompt lookup. Name one in draft.pools, or leave it unset" -}}
{{- end -}}
{{- if and (not $all.tls.front.enabled) (not (include "specdec.poolsAlone" .)) -}}
{{-   if $all.auth.existingSecret -}}
{{-     $told = append $told "tokens without TLS (auth.allowInsecure): whoever sits between clients and orchestrators reads them" -}}
{{-   else -}}
{{-     $told = append $told "clients are neither encrypted nor asked who they are: tls.front, auth.existingSecret" -}}
{{-   end -}}
{{- end -}}
{{- if not $all.tls.internal.enabled -}}
{{-   $told = append $told "between orchestrators and pools everything is plain text: tls.internal" -}}
{{- else if not (include "specdec.poolsAllowedIdentities" .) -}}
{{-   $told = append $told "the pools serve any certificate of their authorities: name the orchestrators' in tls.internal.allowedIdentities" -}}
{{- end -}}
{{- if not $all.networkPolicy.enabled -}}
{{-   $told = append $told "any pod of the cluster can reach the pools and the health ports: networkPolicy.enabled" -}}
{{- end -}}
{{- if and $all.networkPolicy.enabled $all.networkPolicy.egress.restrict -}}
{{-   range $component := list "orchestrator" "target" "draft" -}}
{{-     range compact (include "specdec.hubs" (dict "root" $ "component" $component) | fromJsonArray) -}}
{{-       if not (include "specdec.namespaceOf" (dict "host" (include "specdec.hostOf" .) "own" $.Release.Namespace)) -}}
{{-         $told = append $told (printf "the policies let downloads reach %s at a public address only: networkPolicy.egress.allow for a private one" .) -}}
{{-       end -}}
{{-     end -}}
{{-   end -}}
{{- end -}}
{{- if and $all.grpcRoute.enabled $all.tls.front.enabled -}}
{{-   $told = append $told "the gateway of grpcRoute has to speak TLS to the orchestrators: add a BackendTLSPolicy, in extraObjects" -}}
{{- end -}}
{{- $fingerprints := list -}}
{{- range $component, $pools := dict "target" $targets "draft" $drafts -}}
{{-   range $pool, $values := $pools -}}
{{-     $name := printf "%s pool %s" $component $pool -}}
{{-     $gpus := int $values.gpu.count -}}
{{-     if and (eq $component "target") (not (include "specdec.autoscaled" $values)) (eq (int $values.replicas) 1) (eq (len $pools) 1) -}}
{{-       $told = append $told (printf "%s has one replica and no autoscaling: while it is away, answers wait" $name) -}}
{{-     end -}}
{{-     if and (gt $gpus 0) (not $values.image) -}}
{{-       $told = append $told (printf "%s asks for a GPU and runs the default image, whose torch may know no GPU: set %s.image" $name $component) -}}
{{-     end -}}
{{-     if eq $values.autoscaling.type "hpa" -}}
{{-       $told = append $told (printf "%s scales by the external metric %s, which an adapter of Prometheus has to serve" $name $values.autoscaling.hpa.metricName) -}}
{{-     end -}}
{{-     if gt $gpus 1 -}}
{{-       $told = append $told (printf "%s asks for %d GPUs a replica; a process computes on one" $name $gpus) -}}
{{-     end -}}
{{-     if and (eq $values.model.source "hf") (not $values.model.hf.revision) -}}
{{-       $told = append $told (printf "%s loads whatever %s is at the moment: pin %s.model.hf.revision" $name $values.model.hf.repository $component) -}}
{{-     end -}}
{{-     if eq $component "target" -}}
{{-       $dtype := $values.config.dtype | default (ternary "bfloat16" "int8" (gt $gpus 0)) -}}
{{-       $fingerprints = append $fingerprints (printf "%s on %s" $dtype (ternary "GPU" "CPU" (gt $gpus 0))) -}}
{{-     end -}}
{{-   end -}}
{{- end -}}
{{- if gt (len (uniq $fingerprints)) 1 -}}
{{-   $told = append $told (printf "the pools of targets compute differently (%s): a session that moves between them goes on with the other's text" (join ", " (uniq $fingerprints))) -}}
{{- end -}}
{{- if $told }}

Worth knowing:
{{- range uniq $told }}
  - {{ . }}
{{- end }}
{{- end }}
{{- end -}}
