#!/bin/sh
# Builds a real Kubernetes API server and its controllers from Debian 12's source package (1.20.2), for the tests of the
# kubernetes provisioner: some ten minutes and 3 GB the first time. Needs apt-get, openssl and no rights of root.
#
#   tools/build_kubernetes.sh FOLDER      leaves etcd, kube-apiserver and kube-controller-manager in FOLDER/bin
set -eu

folder=$(mkdir -p "$1" && cd "$1" && pwd)
work=$folder/work
mkdir -p "$folder/bin" "$work/apt/lists/partial" "$work/apt/sources" "$work/debs" "$work/root"
cd "$work"

# The machine's own package sources, and their source packages, in lists of our own.
cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
  sed -n 's/^deb \(.*\)$/deb \1\ndeb-src \1/p' > apt/sources/ours.list
for one in /etc/apt/sources.list.d/*.sources; do
  [ -e "$one" ] && sed 's/^Types:.*/Types: deb deb-src/' "$one" > "apt/sources/$(basename "$one")"
done
apt() {
  apt-get -q -o Dir::State::lists="$work/apt/lists" -o Dir::Etc::sourcelist=/dev/null \
    -o Dir::Etc::sourceparts="$work/apt/sources" -o APT::Sandbox::User=root "$@"
}
apt update
(cd debs && apt download etcd-server golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev)
for one in debs/*.deb; do dpkg -x "$one" root; done
apt source --download-only kubernetes

export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$work/go GOCACHE=$work/cache GO111MODULE=off GOFLAGS= CGO_ENABLED=0
export PATH="$GOROOT/bin:$PATH"
source=$GOPATH/src/k8s.io/kubernetes
rm -rf "$source" && mkdir -p "$source"
tar -xzf kubernetes_*.orig.tar.gz -C "$source" --strip-components=1
cd "$source"

# Its reflect2 is older than this Go: with it, the server dies at the first custom resource.
rm -rf vendor/github.com/modern-go/reflect2
cp -r "$work/root/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/reflect2

# The one file that a source package lacks.
go build -o "$folder/bin/openapi-gen" k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
packages=$(grep -rl --include='*.go' '+k8s:openapi-gen=' staging/src/k8s.io pkg cmd |
  grep -v -E '_test.go|/testdata/|_examples|sample-|code-generator|kube-openapi' | xargs -n1 dirname | sort -u |
  sed -e 's#^staging/src/#k8s.io/kubernetes/vendor/#' -e 's#^\(pkg\|cmd\)#k8s.io/kubernetes/\1#' | paste -sd,)
"$folder/bin/openapi-gen" -O zz_generated.openapi -p k8s.io/kubernetes/pkg/generated/openapi -i "$packages" \
  -h hack/boilerplate/boilerplate.generatego.txt -r "$work/violations.txt"

go build -o "$folder/bin/" k8s.io/kubernetes/cmd/kube-apiserver k8s.io/kubernetes/cmd/kube-controller-manager
cp "$work/root/usr/bin/etcd" "$folder/bin/etcd"
rm -rf "$work"
