#!/usr/bin/env bash
# Builds kube-apiserver and etcd from the Go module proxy into FOLDER/bin: `scripts/build_kube.sh FOLDER`.
set -euo pipefail
KUBERNETES=34.0 ETCD=3.6.4
mkdir -p "$1/bin" "$1/server" "$1/etcd" && cd "$1"
STAGING="api apiextensions-apiserver apimachinery apiserver cli-runtime client-go cloud-provider cluster-bootstrap
  code-generator component-base component-helpers controller-manager cri-api cri-client csi-translation-lib
  dynamic-resource-allocation endpointslice externaljwt kms kube-aggregator kube-controller-manager kube-proxy
  kube-scheduler kubectl kubelet metrics mount-utils pod-security-admission sample-apiserver sample-cli-plugin
  sample-controller"
# A main module may replace; the replacements of k8s.io/kubernetes itself (./staging) do not count in it.
{
    printf 'module server\n\ngo 1.24.0\n\nrequire k8s.io/kubernetes v1.%s\n\nreplace (\n' "$KUBERNETES"
    for one in $STAGING; do printf '\tk8s.io/%s => k8s.io/%s v0.%s\n' "$one" "$one" "$KUBERNETES"; done
    echo ')'
} > server/go.mod
echo 'package server; import _ "k8s.io/kubernetes/cmd/kube-apiserver"' > server/tools.go
sed -i '1i //go:build tools\n' server/tools.go
printf 'module etcd\n\ngo 1.24.0\n\nrequire go.etcd.io/etcd/server/v3 v%s\n' "$ETCD" > etcd/go.mod
printf '//go:build tools\n\npackage etcd\n\nimport _ "go.etcd.io/etcd/server/v3"\n' > etcd/tools.go
# Without a version charts find a server of v0.0.0.
at=k8s.io/component-base/version
flags="-s -w -X $at.gitVersion=v1.$KUBERNETES -X $at.gitMajor=1 -X $at.gitMinor=${KUBERNETES%%.*}"
build() { (cd "$1" && go mod tidy && nice go build -ldflags="$2" -o "../bin/$3" "$4"); }
[ -x bin/kube-apiserver ] || build server "$flags" kube-apiserver k8s.io/kubernetes/cmd/kube-apiserver
[ -x bin/etcd ] || build etcd '-s -w' etcd go.etcd.io/etcd/server/v3
