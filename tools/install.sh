#!/bin/sh
# Makes or repairs the virtual environment and installs the package with its development tools.
#
#   tools/install.sh PYTHON VENV
#
# The Makefile calls this when VENV is missing, broken, from another checkout, or older than
# pyproject.toml or constraints.txt. PYTHON is the interpreter to build VENV with; when it cannot
# make one, other interpreters on the path are tried before this gives up and says what to do.
set -eu

python=$1
venv=$2
# Stands inside the environment while pip runs: found at the next start, it means that a run was
# killed half-way, and packages may be half-written without pip noticing.
unfinished=$venv/.unfinished

say() { printf '%s\n' "$*" >&2; }

# A signal to this script ends what it started too: a pip left running would write into the
# environment that the next run makes.
child=
trap '[ -z "$child" ] || kill "$child" 2>/dev/null; exit 130' INT TERM HUP
run() {
    "$@" &
    child=$!
    wait "$child"
    child=
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# `import ensurepip` alone succeeds on some distributions that ship the module without its wheels.
has_ensurepip() { "$1" -c 'import ensurepip, venv; ensurepip.version()' >/dev/null 2>&1; }

# --python came with pip 22.3 and wants a path.
has_pip() { "$1" -m pip --python "$(command -v "$1")" --version >/dev/null 2>&1; }

# Prints the first interpreter that passes both tests, the wanted one first.
find_python() {
    for candidate in "$python" python3.11 python3.12 python3.13 python3.14 python3; do
        if new_enough "$candidate" && "$1" "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

explain_failure() {
    say ""
    if new_enough "$python"; then
        say "Found: $python ($("$python" --version 2>&1)) has neither ensurepip nor pip, and no other Python >= 3.11 on the path has."
        say "Expected: a Python that can make a virtual environment with pip inside."
        say "To fix it: install the missing part (Debian and Ubuntu: apt install python3-venv), or name"
        say "another interpreter: make $(printf '%s' "${MAKECMDGOALS:-test}") PYTHON=/path/to/python3.12"
    else
        version=$("$python" --version 2>/dev/null) || version='not there'
        say "Found: $python is $version; no newer interpreter is on the path."
        say "Expected: Python 3.11 or newer."
        say "To fix it: install one, or name it: make $(printf '%s' "${MAKECMDGOALS:-test}") PYTHON=/path/to/python3.12"
    fi
    exit 2
}

# Renamed before it is deleted: a run killed half-way through the deletion must not leave something
# that still answers as a Python.
remove_venv() {
    [ -e "$venv" ] || [ -L "$venv" ] || return 0
    if [ "$venv" != .venv ] && [ ! -e "$venv/.made-in" ] && [ -n "$(ls -A "$venv")" ]; then
        say "Found: VENV=$venv is in use, but not as an environment that this Makefile made or can use."
        say "To fix it: remove it yourself if nothing in it is needed, or choose another: VENV=.venv"
        exit 2
    fi
    aside=$venv.removing.$$
    mv "$venv" "$aside"
    rm -rf "$aside"
}

# Without its pyvenv.cfg, bin/python is the system's Python under another name, and pip would install
# into the system: so this asks the interpreter itself where it lives.
is_venv() {
    "$1/bin/python" -c 'import os, sys
inside = os.path.realpath(sys.prefix) == os.path.realpath(sys.argv[1])
sys.exit(not (inside and sys.prefix != sys.base_prefix))' "$1" >/dev/null 2>&1
}

make_venv() {
    remove_venv
    rm -rf "$venv".removing.*
    if chosen=$(find_python has_ensurepip); then
        say "Making $venv with $("$chosen" --version) ..."
        run "$chosen" -m venv "$venv"
    elif chosen=$(find_python has_pip); then
        say "$chosen has no ensurepip; making $venv and putting pip in with $chosen's own pip ..."
        run "$chosen" -m venv --without-pip "$venv"
        run "$chosen" -m pip --python "$venv/bin/python" install --quiet pip
    else
        explain_failure
    fi
}

# A broken interpreter (a removed Python), no pip, a killed install, or scripts of another checkout
# (the folder was moved or copied: their first lines name the old place).
usable() {
    [ ! -e "$unfinished" ] || return 1
    is_venv "$venv" || return 1
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || return 1
    new_enough "$venv/bin/python" || return 1
    # An environment that somebody else made here is welcome: it has no such file yet.
    [ ! -e "$venv/.made-in" ] || [ "$(cat "$venv/.made-in")" = "$(pwd -P)" ]
}

if ! usable; then
    [ ! -e "$venv" ] || say "$venv is half-made, broken or from another place: making it anew."
    make_venv
    is_venv "$venv" || { say "$venv was made, but is not an environment of its own; nothing was installed."; exit 2; }
fi
pwd -P >"$venv/.made-in"
: >"$unfinished"
say "Installing dragoman and its development tools (the first time this takes minutes) ..."
quiet=--quiet
[ ! -t 1 ] || quiet=
# shellcheck disable=SC2086  # $quiet is one option or none
run "$venv/bin/python" -m pip install $quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
rm -f "$unfinished"
