"""Every name of Megatron Core's documented API is where its documentation has it, with the parameters of it."""

from __future__ import annotations

import importlib
import inspect

import pytest

SIGNATURES = {
    "serialization": """
        load(sharded_state_dict, checkpoint_dir, sharded_strategy, common_strategy, validate_access_integrity)
        load_common_state_dict(checkpoint_dir)
        load_plain_tensors(checkpoint_dir)
        load_sharded_objects(sharded_state_dict, checkpoint_dir)
        load_tensors_metadata(checkpoint_dir, sharded_strategy)
        save(sharded_state_dict, checkpoint_dir, sharded_strategy, common_strategy, validate_access_integrity)
        validate_sharding_integrity(global_metadata, common_state_dict)
    """,
    "mapping": """
        LocalNonpersitentObject(obj)
        ShardedBase()
        ShardedObject(key, data, global_shape, global_offset, replica_id)
        ShardedTensor(key, data, dtype, local_shape, global_shape, global_offset, axis_fragmentations, replica_id, \
prepend_axis_num, allow_shape_mismatch, flattened_range)
        ShardedTensor.from_rank_offsets(key, data, rank_offsets, replica_id, prepend_axis_num, allow_shape_mismatch)
        ShardedTensor.global_coordinates(self)
        ShardedTensor.global_slice(self)
        ShardedTensor.init_data(self, device, init_fn)
        ShardedTensor.local_coordinates(self)
        ShardedTensor.max_allowed_chunks(self)
        ShardedTensorFactory(key, data, build_fn, merge_fn, replica_id)
        apply_factories(sharded_state_dict)
        apply_factory_merges(x1, x2, key)
        is_main_replica(replica_id)
    """,
    "optimizer": """
        get_optim_param_to_id_map(optim_params_iter)
        get_param_id_to_sharded_param_map(model_sharded_state_dict, optim_params_iter)
        make_sharded_optimizer_tensor(model_param, optim_param, prefix)
        optim_state_to_sharding_state(optim_state_dict, id_to_sharded_param_map, exclude_keys)
    """,
    "core": """
        CheckpointingConfig(sharded_backend, sharded_backend_version, common_backend, common_backend_version)
        check_is_distributed_checkpoint(checkpoint_dir)
        maybe_load_config(checkpoint_dir)
        save_config(config, checkpoint_dir)
    """,
    "dict_utils": """
        dict_list_map_inplace(f, x)
        dict_list_map_outplace(f, x)
        dict_map(f, d)
        dict_map_with_key(f, d)
        diff(x1, x2, prefix)
        extract_matching_values(x, predicate, return_lists_as_dicts)
        inspect_types(x, prefix, indent)
        map_reduce(xs, key_fn, value_fn, reduce_fn)
        merge(x1, x2, key)
        nested_items_iter(x)
        nested_values(x)
    """,
    "utils": """
        add_prefix_for_sharding(sharded_state_dict, prefix)
        apply_prefix_mapping(sharded_state_dict, prefix_map)
        extract_nonpersistent(sharded_state_dict)
        extract_sharded_base(sharded_state_dict)
        extract_sharded_tensors(sharded_state_dict)
        extract_sharded_tensors_and_factories(sharded_state_dict)
        extract_sharded_tensors_or_nonpersistent(sharded_state_dict)
        replace_prefix_for_sharding(sharded_state_dict, old_prefix, new_prefix)
    """,
    "strategies.base": """
        LoadShardedStrategy()
        LoadCommonStrategy()
        SaveShardedStrategy(backend, version)
        SaveCommonStrategy(backend, version)
    """,
}
NAMES = [(module, line.strip()) for module, lines in SIGNATURES.items() for line in lines.strip().split("\n")]


@pytest.mark.parametrize(("module", "signature"), NAMES, ids=[signature.partition("(")[0] for _, signature in NAMES])
def test_a_documented_name_has_its_parameters_in_their_order(module, signature) -> None:
    path, _, parameters = signature.rstrip(")").partition("(")
    found = importlib.import_module(f"keepstep.sharded.{module}")
    for name in path.split("."):
        found = getattr(found, name)
    expected = parameters.split(", ") if parameters else []
    assert list(inspect.signature(found).parameters)[: len(expected)] == expected


def test_the_parameters_have_the_documented_defaults() -> None:
    sharded = importlib.import_module("keepstep.sharded")
    for function in (sharded.save, sharded.load):
        parameters = inspect.signature(function).parameters
        assert [parameters[name].default for name in ("sharded_strategy", "common_strategy")] == [None, None]
        assert parameters["validate_access_integrity"].default is True
