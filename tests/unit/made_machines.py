"""Made-up machines with every attention package installed, in a release that serves, or in another."""

from safelight.platforms import DeviceFacts, MachineFacts, PackageFacts

FLAG = "return_attn_probs"
# Releases that serve, by key: everything else is a test's own subject.
GOOD = {
    "flash_attn_2": PackageFacts(dist="flash-attn", version="2.8.3"),
    "flash_attn_3": PackageFacts(dist="flash-attn-3", version="3.0.0", parameters=("q", "k", "v", FLAG)),
    "flash_attn_4": PackageFacts(dist="flash-attn-4", version="4.0.0b36"),
    "amd_aiter": PackageFacts(dist="amd-aiter", version="0.1.7"),
    "sageattention": PackageFacts(dist="sageattention", version="2.2.0"),
    "sageattn3": PackageFacts(dist="sageattn3", version="1.0.0"),
    "xformers": PackageFacts(dist="xformers", version="0.0.35"),
    "flashinfer": PackageFacts(dist="flashinfer-python", version="0.7.4"),
    "torch_npu": PackageFacts(dist="torch-npu", version="2.14.0"),
    "mindiesd": PackageFacts(dist="mindiesd", version="3.1.0"),
    "xpu_flash": PackageFacts(dist="vllm-xpu-kernels", version="0.1.16.2"),
    "mate": PackageFacts(dist="mate", version="0.2.5"),
}


def machine(platform, arch, packages=None, **facts):
    """A machine of this kind with every package installed in a release that serves, or with these."""
    if platform == "cuda":
        facts.setdefault("cuda_version", "12.8")
    device = DeviceFacts(arch=arch, name="made up")
    return MachineFacts(platform=platform, devices=(device,), packages=GOOD if packages is None else packages, **facts)


def with_release(platform, arch, key, **facts):
    """The same, with one package in another release."""
    return machine(platform, arch, {**GOOD, key: PackageFacts(**{"dist": GOOD[key].dist, **facts})})
