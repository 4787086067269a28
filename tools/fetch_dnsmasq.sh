#!/bin/sh
# Unpacks Debian's dnsmasq and the libraries that it needs into FOLDER, without installing anything.
#   tools/fetch_dnsmasq.sh FOLDER
set -eu
mkdir -p "$1"
cd "$1"
apt-get -q -o APT::Sandbox::User=root download dnsmasq-base libnetfilter-conntrack3 libnftables1 libnfnetlink0 libnftnl11 \
  libmnl0 libjansson4 libxtables12 libdbus-1-3 libidn2-0 libunistring2 libnettle8 libhogweed6 libgmp10 libedit2 libbsd0 \
  libmd0 libtinfo6 liblzma5 libsystemd0 libcap2 liblz4-1 libzstd1 libgcrypt20 libgpg-error0
for one in *.deb; do dpkg -x "$one" root; done
rm -f ./*.deb
cat > dnsmasq <<'END'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/root
libraries=$(uname -m)-linux-gnu
LD_LIBRARY_PATH=$root/usr/lib/$libraries:$root/lib/$libraries exec "$root/usr/sbin/dnsmasq" "$@"
END
chmod +x dnsmasq
