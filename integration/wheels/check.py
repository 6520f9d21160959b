"""Examines wheels: their names, their contents, and the requirements of their extensions.

    check.py WHEEL...

Prints a line for each wheel, with its errors. Exits with status 1 if there is an error.
"""

# ruff: noqa: T201  (its output is a list)
from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

MOST_BYTES = 5_000_000
GLIBC = (2, 28)
EXTENSIONS = ("_native", "_bench")
LOADER = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
# Libraries of glibc.
LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
# The first bytes of fatbinary's output.
FATBIN = bytes.fromhex("50ed55ba")
NAME = re.compile(
    r"kv_connector-(?P<version>[^-]+)-(?P<python>cp3\d+)-(?P=python)-manylinux_2_28_(?P<machine>x86_64|aarch64)\.whl"
)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def faults_of_extension(name: str, data: bytes, machine: str) -> Iterator[str]:
    elf = ELFFile(io.BytesIO(data))
    if elf["e_machine"] != MACHINES[machine]:
        yield f"{name} is for {elf['e_machine']}"
    needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
    if foreign := needed - LIBRARIES - {LOADER[machine]}:
        yield f"{name} needs {', '.join(sorted(foreign))}"
    for library, versions in elf.get_section_by_name(".gnu.version_r").iter_versions():
        for version in versions:
            family, _, number = version.name.partition("_")
            if family != "GLIBC" or numbers(number) > GLIBC:
                yield f"{name} needs {version.name} of {library.name}"
    symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())
    exported = {s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF" and s.name}
    module = Path(name).name.partition(".")[0]
    if exported != {f"PyInit_{module}"}:
        yield f"{name} exports {', '.join(sorted(exported)[:5])}: {len(exported)} names"
    if any(section.name.startswith((".debug", ".symtab")) for section in elf.iter_sections()):
        yield f"{name} has its symbols and debug information still"
    if b"/native/" in data and (match := re.search(rb"/[ -~]{0,200}/native/(?:base|engine|lane)/", data)):
        yield f"{name} names a folder of the machine that made it: {match[0].decode()}"


def faults(path: Path) -> Iterator[str]:
    match = NAME.fullmatch(path.name)
    if match is None:
        yield "has another name than our wheels"
        return
    python, machine, version = match["python"], match["machine"], match["version"]
    if path.stat().st_size > MOST_BYTES:
        yield f"is larger than {MOST_BYTES:,} bytes"
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        info = f"kv_connector-{version}.dist-info"
        extensions = [f"kv_connector/{e}.cpython-{python[2:]}-{machine}-linux-gnu.so" for e in EXTENSIONS]
        found = [name for name in names if name.endswith(".so")]
        if sorted(found) != sorted(extensions):
            yield f"has the extensions {', '.join(found)}"
            return
        for name in extensions:
            yield from faults_of_extension(name, wheel.read(name), machine)
        if FATBIN not in wheel.read(extensions[0]):
            yield "has no GPU kernels"
        if strangers := [n for n in names if not n.startswith(("kv_connector/", f"{info}/"))]:
            yield f"has {', '.join(strangers)}"
        for wanted in ("kv_connector/py.typed", f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"):
            if wanted not in names:
                yield f"lacks {wanted}"
        tags = Parser().parsestr(wheel.read(f"{info}/WHEEL").decode()).get_all("Tag") or []
        if tags != [f"{python}-{python}-manylinux_2_28_{machine}"]:
            yield f"says that it is for {', '.join(tags)}"
        boms = [name for name in names if name.startswith(f"{info}/sboms/")]
        if len(boms) != 1:
            yield f"has {len(boms)} bills of materials"
        else:
            bom: dict[str, Any] = json.loads(wheel.read(boms[0]))
            if bom["metadata"]["component"]["version"] != version:
                yield "has the bill of materials of another version"
    yield from faults_by_auditwheel(path, f"manylinux_2_28_{machine}")


def faults_by_auditwheel(path: Path, platform: str) -> Iterator[str]:
    """Checks with auditwheel that the wheel needs no newer machine than its name says, and no library put
    into it."""
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", path], check=False, capture_output=True, text=True
    )
    words = " ".join(shown.stdout.split())
    tag = re.search(r'consistent with the following platform tag: "(\w+?)_(\d+)_(\d+)_(\w+)"', words)
    if tag is None or (int(tag[2]), int(tag[3])) > GLIBC or not platform.endswith(tag[4]):
        yield f"auditwheel: {words or shown.stderr}"


def main() -> int:
    wrong = 0
    for path in map(Path, sys.argv[1:]):
        found = list(faults(path))
        wrong += len(found)
        print(f"{path.name}: {path.stat().st_size:,} bytes{'' if found else ', in order'}")
        for fault in found:
            print(f"  {fault}")
    return 1 if wrong else 0


sys.exit(main())
