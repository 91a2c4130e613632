"""Simulate hosts with EFA devices that are not there: the kernel's answers about them, for a
container of a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

AMAZON = "1d0f"
NVIDIA = "10de"


@dataclass(frozen=True, kw_only=True)
class EfaHost:
    """A host as a container of it sees it.

    Attributes:
        name: EC2 instance type, which the plugin asks for.
        part: Number of the PCI device: its generation.
        cards: How many EFA devices there are.
        per_gpu: How many of them are beside one GPU.
    """

    name: str
    part: str
    cards: int
    per_gpu: int = 1

    def write(self, folder: Path) -> None:
        """Write the files that a container of this host gets.

        Args:
            folder: Gets ``class`` and ``bus`` (to be those of /sys), ``nodes`` (/dev/infiniband)
                and ``topology.xml`` (for hwloc).
        """
        classes = folder / "class"
        for name in ("infiniband", "infiniband_verbs", "pci_bus"):
            (classes / name).mkdir(parents=True)
        (folder / "nodes").mkdir()
        (classes / "net").symlink_to("/sys/devices/virtual/net")
        (classes / "infiniband_verbs" / "abi_version").write_text("6\n")
        driver = classes / "tree" / "drivers" / "efa"
        driver.mkdir(parents=True)
        for index in range(self.cards):
            bus = 16 + index
            name = f"rdmap{bus}s27"
            root = classes / "tree" / f"pci0000:{bus:02x}"
            device = root / f"0000:{bus:02x}:1b.0"
            place = root / "pci_bus" / f"0000:{bus:02x}"
            for new_folder in (
                device,
                place,
                classes / "infiniband" / name,
                classes / "infiniband_verbs" / f"uverbs{index}",
            ):
                new_folder.mkdir(parents=True)
            (classes / "pci_bus" / f"0000:{bus:02x}").symlink_to(
                f"../tree/{root.name}/pci_bus/{place.name}"
            )
            (device / "driver").symlink_to("../../drivers/efa")
            (device / "vendor").write_text(f"0x{AMAZON}\n")
            (device / "device").write_text(f"0x{self.part}\n")
            (classes / "infiniband" / name / "device").symlink_to(
                f"../../tree/{root.name}/{device.name}"
            )
            # How the plugin reads the path: the card's PCI bus in the second byte from the right.
            (classes / "infiniband" / name / "node_guid").write_text(
                f"{index:04x}:0000:0000:{bus:02x}00\n"
            )
            (classes / "infiniband_verbs" / f"uverbs{index}" / "ibdev").write_text(f"{name}\n")
            (folder / "nodes" / f"uverbs{index}").touch()
            for number in ("1b", "1c"):
                link = folder / "bus" / "pci" / "devices" / f"0000:{bus:02x}:{number}.0"
                link.mkdir(parents=True)
                (link / "max_link_speed").write_text("16.0 GT/s PCIe\n")
                (link / "max_link_width").write_text("16\n")
        (folder / "topology.xml").write_text(self._topology())

    def _topology(self) -> str:
        """Return the host's hardware in hwloc's format: one bridge with a GPU
        and its cards, as often as needed.
        """
        sets = " ".join(
            f'{prefix}{kind}="0x1"'
            for kind in ("cpuset", "nodeset")
            for prefix in ("", "complete_", "allowed_")
        )
        lines = ['<?xml version="1.0" encoding="UTF-8"?>', '<topology version="2.0">']
        lines += [f'<object type="Machine" os_index="0" gp_index="1" {sets}>']
        lines += [
            f'<object type="NUMANode" os_index="0" gp_index="2" {sets} local_memory="1073741824"/>'
        ]
        lines += [f'<object type="PU" os_index="0" gp_index="3" {sets}/>']
        number = 4
        for first in range(0, self.cards, self.per_gpu):
            buses = [16 + index for index in range(first, min(first + self.per_gpu, self.cards))]
            lines.append(
                f'<object type="Bridge" gp_index="{number}" bridge_type="0-1" depth="0"'
                f' bridge_pci="0000:[{buses[0]:02x}-{buses[-1]:02x}]">'
            )
            parts = [(f"{bus:02x}:1b.0", "0200", AMAZON, self.part) for bus in buses]
            parts.append((f"{buses[0]:02x}:1c.0", "0302", NVIDIA, "2330"))
            for offset, (place, kind, vendor, part) in enumerate(parts, 1):
                lines.append(
                    f'<object type="PCIDev" gp_index="{number + offset}" pci_busid="0000:{place}"'
                    f' pci_type="{kind} [{vendor}:{part}] [{vendor}:{part}] 00"'
                    ' pci_link_speed="15.75"/>'
                )
            lines.append("</object>")
            number += len(parts) + 1
        return "\n".join((*lines, "</object>", "</topology>", ""))


P3DN = EfaHost(name="p3dn.24xlarge", part="efa0", cards=1)
P4D = EfaHost(name="p4d.24xlarge", part="efa1", cards=4)
P5 = EfaHost(name="p5.48xlarge", part="efa2", cards=32, per_gpu=4)
P6 = EfaHost(name="p6-b200.48xlarge", part="efa3", cards=8)
