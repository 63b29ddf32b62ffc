"""Profiles as other projects write them, and what becomes of each: accelerate's templates, TRL's examples, and others.

They are for a CPU here, as far as that is not what they are about: `use_cpu`, and few processes.
"""

from typing import Any

FSDP1 = {
    "fsdp_activation_checkpointing": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": True,
}
FSDP2 = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True}
FULL = FSDP2 | {"fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True}
# What `accelerate config` and TRL's files write in addition, of which nothing concerns these machines.
MORE = {"compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no", "enable_cpu_affinity": False}
MORE |= {"machine_rank": 0, "main_training_function": "main", "num_machines": 1, "rdzv_backend": "static"}
MORE |= {"same_network": True, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False}
ZERO = {"deepspeed_multinode_launcher": "standard", "gradient_accumulation_steps": 1, "zero_stage": 3}
ZERO |= {"offload_optimizer_device": "none", "offload_param_device": "none", "zero3_init_flag": True}


def of(kind: str, processes: int | None = 2, precision: str | bool = "no", **settings: Any) -> dict[str, Any]:
    """Return a profile's settings."""
    count = {} if processes is None else {"num_processes": processes}
    return MORE | {"distributed_type": kind, "use_cpu": True, "mixed_precision": precision} | count | settings


def mesh(**sizes: Any) -> dict[str, Any]:
    """Return parallelism_config."""
    return {f"parallelism_config_{name}": size for name, size in sizes.items()}


WORK = {
    "accelerate's multi_gpu": {"distributed_type": "MULTI_GPU", "use_cpu": True, "num_processes": 2},
    "accelerate's single_gpu": {"distributed_type": "NO", "use_cpu": True, "num_processes": 1},
    "without num_processes, of one process": {"distributed_type": "NO", "use_cpu": True},
    "accelerate's fsdp": of("FSDP", fsdp_config=FSDP1),
    "TRL's multi_gpu": of("MULTI_GPU", precision="bf16", gpu_ids="all"),
    "TRL's fsdp2": of("FSDP", precision="bf16", fsdp_config=FULL),
    "TRL's fsdp_qlora": of("FSDP", fsdp_config=FSDP1 | {"fsdp_use_orig_params": False, "fsdp_offload_params": True}),
    "FSDP1 that shards less": of("FSDP", fsdp_config=FSDP1 | {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}),
    "FSDP1 by numbers": of("FSDP", fsdp_config=FSDP1 | {"fsdp_sharding_strategy": 1}),
    "FSDP1 by size": of("FSDP", fsdp_config=FSDP1 | {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}),
    "FSDP1 with one layer class": of(
        "FSDP", fsdp_config=FSDP1 | {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    ),
    "keys without their section's name": of("FSDP", fsdp_config={"version": 2, "auto_wrap_policy": "NO_WRAP"}),
    "a mesh of one": of("FSDP", fsdp_config=FSDP2, parallelism_config=mesh(dp_shard_size=1, tp_size=1)),
    "copies alone": of("MULTI_GPU", parallelism_config=mesh(dp_replicate_size=2)),
    "keys of old files": {"distributed_type": "MULTI_GPU", "use_cpu": True, "num_processes": 2, "fp16": False},
    "a compiler that is none": of("MULTI_GPU", dynamo_config={"dynamo_backend": "NO"}),
}
# What is refused, with words of the reason; RUN: by a rank too, which has no more than its environment.
RUN = "run"
REFUSED: dict[str, tuple] = {
    "accelerate's deepspeed": (of("DEEPSPEED", deepspeed_config=ZERO), "DeepSpeed on CPU", RUN),
    "TRL's deepspeed_zero3": (of("DEEPSPEED", precision="fp16", deepspeed_config=ZERO, use_cpu=False), "deepspeed"),
    "accelerate's fp8": (of("NO", 1, "fp8", fp8_config={"backend": "TE"}), "fp8 on CPU", RUN),
    "accelerate's fp8 on a GPU": (
        of("NO", 1, "fp8", use_cpu=False, fp8_config={"backend": "TE", "fp8_format": "E4M3", "margin": 0}),
        "transformer_engine is not installed",
    ),
    "torchao's fp8 on GPUs": (
        of("FSDP", 2, "fp8", use_cpu=False, fsdp_config=FSDP2, fp8_config={"fp8_backend": "AO"}),
        "torchao is not installed",
    ),
    "MS-AMP's fp8 on GPUs": (of("MULTI_GPU", 2, "fp8", use_cpu=False, fp8_config={"backend": "MSAMP"}), "msamp is not"),
    "fp8 of any kind": (of("MULTI_GPU", 2, "fp8", use_cpu=False), "none of msamp, torchao, transformer_engine"),
    "fp16 on a CPU": (of("MULTI_GPU", precision="fp16"), "fp16 on CPU", RUN),
    "an unknown precision": (of("MULTI_GPU", precision="tf32"), "mixed_precision tf32"),
    "no without quotes": (of("MULTI_GPU", precision=False), "mixed_precision no: without quotes"),
    "TRL's context_parallel": (
        of("FSDP", fsdp_config=FULL, parallelism_config=mesh(dp_replicate_size=1, cp_size=2)),
        "cp_size 2",
        RUN,
    ),
    "sequences over processes": (of("FSDP", fsdp_config=FSDP2, parallelism_config=mesh(sp_size=2)), "sp_size 2", RUN),
    "TRL's alst_ulysses": (
        of("DEEPSPEED", 4, "bf16", deepspeed_config=ZERO, parallelism_config=mesh(dp_shard_size=2, cp_size=2)),
        "DeepSpeed on CPU",
        RUN,
    ),
    "a mesh that is larger": (
        of("FSDP", 2, fsdp_config=FSDP2, parallelism_config=mesh(dp_replicate_size=2, dp_shard_size=2)),
        "a mesh of 4 for 2 processes",
        RUN,
    ),
    "a mesh that is smaller": (
        of("FSDP", 4, fsdp_config=FSDP2, parallelism_config=mesh(dp_shard_size=2)),
        "a mesh of 2 for 4 processes",
        RUN,
    ),
    "a mesh that shards nothing": (
        of("FSDP", fsdp_config=FSDP2, parallelism_config=mesh(tp_size=2)),
        "dp_shard_size 1 under FSDP",
        RUN,
    ),
    "shards without FSDP": (of("MULTI_GPU", parallelism_config=mesh(dp_shard_size=2)), "dp_shard_size 2 without", RUN),
    "copies of split layers without FSDP": (
        of("MULTI_GPU", 4, parallelism_config=mesh(dp_replicate_size=2, tp_size=2)),
        "tp_size 2 with dp_replicate_size 2",
        RUN,
    ),
    "no number of processes": (of("MULTI_GPU", None), "num_processes is missing"),
    "a number for the command line": (of("FSDP", -1, fsdp_config=FSDP2), "num_processes is missing"),
    "one process of several": (of("NO", 2), "distributed_type NO: starts one process"),
    "MULTI_CPU": (of("MULTI_CPU"), "distributed_type MULTI_CPU: starts one process"),
    "mpirun": (of("MULTI_CPU", 1, mpirun_config={"mpirun_hostfile": "hosts"}), "mpirun_hostfile"),
    "Megatron-LM": (of("MEGATRON_LM"), "distributed_type MEGATRON_LM", RUN),
    "the TP of old versions": (of("TP"), "distributed_type TP"),
    "TPUs": (of("XLA"), "distributed_type XLA"),
    "a slip": (of("MULTIGPU"), "distributed_type MULTIGPU"),
    "SageMaker": (of("NO", 1, compute_environment="AMAZON_SAGEMAKER"), "compute_environment AMAZON_SAGEMAKER"),
    "FSDP1 in groups": (
        of("FSDP", fsdp_config=FSDP1 | {"fsdp_sharding_strategy": "HYBRID_SHARD"}),
        "fsdp_sharding_strategy HYBRID_SHARD",
        RUN,
    ),
    "FSDP1 that shards nothing": (
        of("FSDP", fsdp_config=FSDP1 | {"fsdp_sharding_strategy": "NO_SHARD"}),
        "fsdp_sharding_strategy NO_SHARD",
        RUN,
    ),
    "FSDP2 with FSDP1's word": (
        of("FSDP", fsdp_config=FSDP2 | {"fsdp_reshard_after_forward": "FULL_SHARD"}),
        "fsdp_reshard_after_forward FULL_SHARD",
    ),
    "a policy that is none": (
        of("FSDP", fsdp_config=FSDP2 | {"fsdp_auto_wrap_policy": "AUTO"}),
        "auto_wrap_policy AUTO",
    ),
    "half of what offloads activations": (
        of("FSDP", fsdp_config=FSDP2 | {"fsdp_activation_checkpointing_offload": True}),
        "fsdp_activation_checkpointing_offload alone",
    ),
    "weights that nobody sends": (
        of("FSDP", fsdp_config=FSDP1 | {"fsdp_sync_module_states": False}),
        "fsdp_sync_module_states false",
    ),
    "an unknown compiler": (of("MULTI_GPU", dynamo_config={"dynamo_backend": "FAST"}), "dynamo_backend fast"),
    "an unknown key": (of("MULTI_GPU", num_process=3), "num_process: accelerate does not know it"),
    "a GPU for two processes": (of("MULTI_GPU", use_cpu=False, gpu_ids="0"), "gpu_ids 0"),
    "a GPU by number": (of("MULTI_GPU", gpu_ids=0), "gpu_ids 0: is not a text"),
}
