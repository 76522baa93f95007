"""The processor by its name and its microarchitecture, for reports, stored measurements and folders of results."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path

# By vendor and family: the first model numbers, in falling order. Clouds hide CPUs behind names like "AMD EPYC".
MICROARCHITECTURES: dict[tuple[str, int], tuple[tuple[int, str], ...]] = {
    ("AuthenticAMD", 0x1A): ((0, "Zen 5"),),
    ("AuthenticAMD", 0x19): ((0x60, "Zen 4"), (0x20, "Zen 3"), (0x10, "Zen 4"), (0, "Zen 3")),
    ("AuthenticAMD", 0x17): ((0x30, "Zen 2"), (0, "Zen")),
    ("GenuineIntel", 6): (
        (208, "Intel"),
        (207, "Emerald Rapids"),
        (175, "Intel"),
        (173, "Granite Rapids"),
        (144, "Intel"),
        (143, "Sapphire Rapids"),
        (109, "Intel"),
        (106, "Ice Lake"),
        (86, "Intel"),
        (85, "Skylake or Cascade Lake"),
        (80, "Intel"),
        (79, "Broadwell"),
        (64, "Intel"),
        (63, "Haswell"),
        (0, "Intel"),
    ),
}

# By implementer and part number, of which Linux tells on Arm.
ARM_CORES: dict[tuple[str, str], str] = {
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0c"): "Neoverse N1",
    ("0x41", "0xd40"): "Neoverse V1",
    ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2",
}


@cache
def facts() -> dict[str, str]:
    """Of the first processor, as Linux describes it; empty elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def microarchitecture() -> str:
    """Such as "Zen 4" or "Sapphire Rapids"; the vendor's or the machine's name where it is not known.

    Of a Xeon whose model number a cloud hides, what it must be: "Xeon AMX".
    """
    vendor, family, model = (facts().get(name, "") for name in ("vendor_id", "cpu family", "model"))
    if family.isdecimal() and model.isdecimal():
        for first, name in MICROARCHITECTURES.get((vendor, int(family)), ()):
            if int(model) >= first:
                hidden = name == "Intel" and "amx_tile" in facts().get("flags", "").split()
                return "Xeon AMX" if hidden else name
    core = ARM_CORES.get((facts().get("CPU implementer", ""), facts().get("CPU part", "")))
    return vendor or core or platform.machine()


def cpu_name() -> str:
    """The name that the operating system has, and the microarchitecture: "AMD EPYC, Zen 4"."""
    name = facts().get("model name") or platform.processor() or platform.machine()
    known = microarchitecture()
    return name if known in name else f"{name}, {known}"


def folder_name() -> str:
    """The microarchitecture as the name of a folder: "zen-4"."""
    return re.sub(r"[^a-z0-9]+", "-", microarchitecture().lower()).strip("-")
