"""The keys of a DeepSpeed JSON and what becomes of each, as tables for `swiftlite.recipe.deepspeed`. Paths are dotted."""

from swiftlite.recipe.reading import Scalar

ZERO, FP16, ACTIVATIONS = "zero_optimization", "fp16", "activation_checkpointing"
ADAM, RATE = "optimizer.params", "scheduler.params"

# DeepSpeed key -> ours. Value words are mapped behind it, by WORDS; other values stay as they are.
TAKEN: dict[str, str] = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "gradient_clipping": "train.max_grad_norm",
    "communication_data_type": "strategy.reduce_dtype",
    "data_types.grad_accum_dtype": "strategy.reduce_dtype",
    f"{ZERO}.stage": "strategy.name",
    "optimizer.type": "train.optim",
    f"{ADAM}.lr": "train.learning_rate",
    f"{ADAM}.eps": "train.adam_epsilon",
    f"{ADAM}.weight_decay": "train.weight_decay",
    "scheduler.type": "train.lr_scheduler_type",
    f"{RATE}.warmup_max_lr": "train.learning_rate",
    f"{RATE}.warmup_num_steps": "train.warmup_steps",
    f"{RATE}.cos_min_ratio": "train.min_lr_ratio",
}

# Keys that need more than a table; see the functions of `swiftlite.recipe.deepspeed`.
READ = {
    f"{ZERO}.offload_param.device", f"{ZERO}.offload_optimizer.device", f"{ZERO}.cpu_offload", f"{ZERO}.cpu_offload_param",
    f"{ZERO}.cpu_offload_params", f"{ZERO}.mics_shard_size", "bf16.enabled", f"{FP16}.enabled", f"{FP16}.loss_scale",
    f"{FP16}.initial_scale_power", f"{FP16}.loss_scale_window", f"{FP16}.min_loss_scale", f"{ADAM}.betas", f"{ADAM}.adam_w_mode",
    f"{RATE}.warmup_type", f"{RATE}.total_num_steps", f"{ACTIVATIONS}.enabled", f"{ACTIVATIONS}.partition_activations",
}  # fmt: skip

_NVME = "Write cpu: there is no offload to NVMe."
_REDUCE = "Write fp32 or bf16."
# Key -> its words in lower case -> our value, and what to do about any other.
WORDS: dict[str, tuple[dict[str, Scalar], str]] = {
    f"{ZERO}.stage": ({"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}, "Stages are 0, 1, 2 and 3."),
    f"{ZERO}.offload_param.device": ({"none": "none", "cpu": "cpu"}, _NVME),
    f"{ZERO}.offload_optimizer.device": ({"none": "none", "cpu": "cpu"}, _NVME),
    "communication_data_type": ({"fp32": "fp32", "bf16": "bf16"}, _REDUCE),
    "data_types.grad_accum_dtype": ({"fp32": "fp32", "bf16": "bf16"}, _REDUCE),
    "optimizer.type": ({"adam": "adamw", "adamw": "adamw"}, "Use AdamW, or leave `optimizer` out and set train.optim."),
    "scheduler.type": (
        {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"},
        "Use WarmupLR, WarmupDecayLR or WarmupCosineLR, or leave `scheduler` out and set train.lr_scheduler_type.",
    ),
    f"{RATE}.warmup_type": ({"linear": "linear"}, "Write linear: no other warm-up is offered."),
}

_OUT = "Leave it out."
# Key -> the values with which it does nothing that is not done here, and what to do about any other.
ONLY: dict[str, tuple[tuple[Scalar, ...], str]] = {
    f"{ZERO}.zero_hpz_partition_size": ((0, 1), "Leave it out; near to it is mics_shard_size, our `strategy: hsdp`."),
    **{f"{ZERO}.{name}": ((False,), "Write false: weights and gradients are not quantized on their way.") for name in (
        "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")},
    "bf16.check_grad_overflow": ((False,), "Leave it out, and set train.on_nonfinite: skip."),
    "bf16.bf16_master_weights_and_grads": ((False,), "Leave the bf16 section out, and set train.precision: bf16_pure."),
    "bf16.bf16_optimizer_states": ((False,), "Leave the bf16 section out, and set train.precision: bf16_pure."),
    f"{FP16}.fp16_master_weights_and_grads": ((False,), "Write false: trained weights are kept in fp32."),
    f"{ADAM}.amsgrad": ((False,), _OUT),
    f"{ADAM}.bias_correction": ((True,), _OUT),
    f"{ADAM}.fp32_optimizer_states": ((True,), _OUT),
    f"{ADAM}.max_grad_norm": ((), "Write it as gradient_clipping at the top level."),
    f"{RATE}.warmup_min_lr": ((0,), "Write 0: the warm-up begins at 0."),
    f"{RATE}.warmup_min_ratio": ((0,), "Write 0: the warm-up begins at 0."),
    f"{RATE}.last_batch_iteration": ((-1,), "Leave it out; checkpoint.resume goes on where a run stopped."),
    f"{ACTIVATIONS}.cpu_checkpointing": ((False,), "Write false: kept activations stay on the device."),
    **{f"tensor_parallel.{name}": ((0, 1), "Write 1; zero3 and fsdp spread a model over the same GPUs.") for name in (
        "autotp_size", "tp_size")},
    "sequence_parallel_size": ((0, 1), "Write 1: a row is not split over GPUs."),
    "dataloader_drop_last": ((False,), "Write false: the last, shorter step of an epoch is trained too."),
    "gradient_allreduce_op": (("avg", "mean"), "Leave it out: a step learns the mean over its trained tokens."),
}  # fmt: skip

# Sections for things that are not offered: refused, unless they say `enabled: false`.
REFUSED: dict[str, str] = {
    "aio": "Leave it out: it serves offload to NVMe, which there is not.",
    "amp": "Leave it out, and set train.precision.",
    "torch_autocast": "Leave it out, and set train.precision.",
    "tensorboard": "Leave it out, and write `log: {report_to: [tensorboard]}`.",
    "wandb": "Leave it out, and write `log: {report_to: [wandb]}`.",
    "comet": "Leave it out, and write `log: {report_to: [comet_ml]}`.",
    "csv_monitor": "Leave it out: metrics.jsonl in the run's folder has every logged row.",
    "curriculum_learning": "Leave it out; data.train_sampling_strategy says the order of rows.",
    **dict.fromkeys((
        "autotuning", "comms_logger", "compression_training", "data_efficiency", "eigenvalue", "elasticity", "flops_profiler",
        "hybrid_engine", "moe", "nebula", "pipeline", "progressive_layer_drop", "quantize_training", "sparse_attention",
        f"{ZERO}.zenflow", f"{ZERO}.zeropp_loco_param"), _OUT),
}  # fmt: skip

# What tunes DeepSpeed's speed, or what it prints, and is not needed here.
NO_EFFECT = {
    "bf16.immediate_grad_update", "checkpoint", "compile", "disable_allgather", "dump_state", "gradient_predivide_factor",
    "graph_harvesting", "managed_gradient_accumulation", "memory_breakdown", "optimizer.legacy_fusion", "prescale_gradients",
    "seq_parallel_communication_data_type", "sparse_gradients", "steps_per_print", "timers", "use_data_before_expert_parallelism",
    "use_node_local_storage", "vocabulary_size", "wall_clock_breakdown", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    *(f"{FP16}.{name}" for name in ("auto_cast", "consecutive_hysteresis", "fused_mode", "hysteresis")),
    *(f"{ADAM}.{name}" for name in ("capturable", "differentiable", "foreach", "fused", "torch_adam")),
    *(f"{ACTIVATIONS}.{name}" for name in (
        "contiguous_memory_optimization", "number_checkpoints", "profile", "synchronize_checkpoint_boundary")),
    *(f"tensor_parallel.{name}" for name in ("partition_config", "preset_model", "tp_grain_size", "tp_overlap_comm")),
    *(f"{ZERO}.{section}.{name}" for section in ("offload_param", "offload_optimizer") for name in (
        "buffer_count", "buffer_size", "cpuadam_cores_perc", "fast_init", "max_in_cpu", "nvme_path", "pin_memory", "pipeline",
        "pipeline_read", "pipeline_write", "ratio", "super_offload")),
    *(f"{ZERO}.{prefix}{name}" for prefix in ("", "stage3_") for name in (
        "allgather_sequential", "gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save", "max_live_parameters",
        "max_reuse_distance", "model_persistence_threshold", "module_granularity_threshold", "param_persistence_threshold",
        "partition_stream_chunk_size", "prefetch_bucket_size", "use_all_reduce_for_fetch_params")),
    *(f"{ZERO}.{name}" for name in (
        "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "cpu_offload_use_pin_memory",
        "elastic_checkpoint", "enable_sanity_checks", "find_unused_parameters", "grad_hooks", "ignore_unused_parameters",
        "leaf_module", "legacy_stage1", "load_from_fp32_weights", "log_trace_cache_warnings", "memory_efficient_linear",
        "mics_hierarchical_params_gather", "overlap_comm", "override_module_apply", "pipeline_loading_checkpoint",
        "reduce_bucket_size", "reduce_scatter", "round_robin_gradients", "save_muon_momentum_buffer_in_memory", "sub_group_size",
        "use_multi_rank_bucket_allreduce")),
}  # fmt: skip

KNOWN = {*TAKEN, *READ, *ONLY, *REFUSED, *NO_EFFECT}
SECTIONS = {".".join(path.split(".")[:depth]) for path in KNOWN for depth in range(1, path.count(".") + 1)}

# What torch's scaler does: from 2**16, doubled after 2,000 steps without overflow. DeepSpeed's own defaults pass: an overflow is
# skipped by both, and so the scale is not what is learned. Least and greatest value of each key.
SCALE: dict[str, tuple[int, int]] = {
    "loss_scale": (0, 0),
    "initial_scale_power": (16, 16),
    "loss_scale_window": (1000, 2000),
    "min_loss_scale": (0, 1),
}
