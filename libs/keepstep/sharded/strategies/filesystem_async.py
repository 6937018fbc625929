"""Public: names of Megatron Core's writer of files, which keepstep refuses to make."""

from keepstep.sharded.refused import refusing

_WRITER = "TorchDistSaveShardedStrategy writes the files itself"

__getattr__ = refusing(
    __name__,
    dict.fromkeys(
        (
            *("FileSystemWriterAsync", "WriteBucket", "_results_queue", "_get_write_results_queue", "_item_size"),
            *("_split_by_size_and_type", "_split_by_separation_hint", "_process_memory"),
        ),
        _WRITER,
    ),
)
