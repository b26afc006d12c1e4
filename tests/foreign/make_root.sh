#!/bin/sh
# make_root.sh ARCHITECTURE FOLDER PACKAGE...: packages of another architecture, unpacked.
#
# ARCHITECTURE is Debian's name (arm64, s390x). The packages come from Debian's unstable suite with
# all that they depend on, and are only unpacked: nothing of this system changes, no script of a
# package runs, and no privileges are needed. apt's own state is kept in FOLDER.apt.
set -eu

architecture=$1 root=$2
shift 2
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
state=$root.apt
mkdir -p "$root" "$state/lists/partial" "$state/archives/partial" "$state/parts"
: > "$state/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" \
  > "$state/sources.list"
cat > "$state/apt.conf" <<END
Dir::State "$state";
Dir::State::Lists "$state/lists";
Dir::State::status "$state/status";
Dir::Cache "$state";
Dir::Cache::archives "$state/archives";
Dir::Etc::sourcelist "$state/sources.list";
Dir::Etc::sourceparts "$state/parts";
Dir::Etc::preferencesparts "$state/parts";
Dir::Log "$state";
APT::Architecture "$architecture";
APT::Architectures { "$architecture"; };
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Debug::NoLocking "true";
END
export APT_CONFIG="$state/apt.conf"
apt-get --quiet=2 update
# The links of a merged /usr come first: the loader is looked for below /lib.
apt-get --quiet=2 --yes --download-only install base-files libc-bin "$@"
for link in bin lib sbin; do
  mkdir -p "$root/usr/$link"
  [ -e "$root/$link" ] || ln -s "usr/$link" "$root/$link"
done
for package in "$state"/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar --extract --keep-directory-symlink --directory "$root"
done
