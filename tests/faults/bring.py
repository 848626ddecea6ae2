"""Faults of what reads weights of other libraries."""

from faults import fault

_NAMES = "test_bring.py::test_the_names_of_every_library_are_found_and_read"
_WRONG = "test_bring.py::test_a_wrong_or_partial_state_dict_names_what_does_not_fit"
_PROGRAMS = "test_bring.py::test_programs_that_are_no_state_dict"

_PAGE = "test_export_torch.py::test_transformers_are_what_the_page_makes_of_their_cards"

FAULTS = [
    *fault.of(
        "export/torch_vit.py",
        _PAGE,
        (
            "export: keys without a bias have no room for one in timm's tensor",
            'biases = {"qkv_bias": "all"} if partly else {}',
            "biases = {}",
        ),
        (
            "export: timm's table is as large as the one that was learned",
            'resized(arrays["positions"], (side, side), section',
            'resized(arrays["positions"], (4, 4), section',
        ),
        (
            "export: timm's fixed table is that of image_size",
            'side = network.card["input"]["size"] // section["patch"]',
            'side = section["image_size"] // section["patch"]',
        ),
    ),
    *fault.of(
        "export/torch_vit.py",
        _NAMES,
        (
            "bring: queries and keys are exchanged",
            'enumerate(("query", "key", "value"))',
            'enumerate(("key", "query", "value"))',
            "test_bring.py::test_the_rows_of_one_tensor_by_hand",
        ),
        (
            "bring: what is gated comes first",
            'enumerate(("gate", "up"))',
            'enumerate(("up", "gate"))',
            "test_bring.py::test_the_rows_of_one_tensor_by_hand",
        ),
        (
            "bring: kernels of patches keep their order of axes",
            "rows = rows.transpose(2, 3, 1, 0)",
            "rows = rows.transpose(3, 2, 1, 0)",
        ),
        (
            "bring: the class token takes the position of the last patch",
            "rows = rows[0, 0]",
            "rows = rows[0, -1]",
        ),
        (
            "bring: DINOv3's masked biases of keys are read",
            'if biased == "none" or (biased == "query_value" and name == "key"):',
            'if biased == "none":',
        ),
    ),
    *fault.of(
        "bring/architectures.py",
        "test_bring.py::test_the_padding_of_a_small_stem_is_asked_for",
        (
            "bring: a stem of 3 x 3 has a padding of 1 unless told",
            "    if stem_padding is None:\n        raise Refused(",
            "    stem_padding = 1 if stem_padding is None else stem_padding\n"
            "    if stem_padding is None:\n        raise Refused(",
        ),
    ),
    *fault.of(
        "bring/architectures.py",
        _WRONG,
        (
            "bring: tensors that are not there are passed over",
            "missing = sorted(needed - tensors.keys())",
            "missing = []",
        ),
        (
            "bring: unknown tensors are passed over",
            "if n not in needed and x.size and not _is_dropped(n, dropped)",
            "if not n",
        ),
        (
            "bring: of two networks the first is taken",
            "if len(found) > 1:",
            "if len(found) > 2:",
        ),
        (
            "bring: blocks may be missing",
            "if numbers != {*range(layers)} or not layers:",
            "if not layers:",
        ),
        (
            "bring: transformers' ViT has the epsilon of the others",
            '1e-12 if name == "transformers" else architecture.epsilon',
            "architecture.epsilon",
            "test_bring.py::test_what_no_tensor_says",
        ),
        (
            "bring: positions are resized alike for all libraries",
            'return "antialias" if registers else "offset"',
            'return "antialias"',
            "test_bring.py::test_what_no_tensor_says",
        ),
        (
            "bring: MoCo v3's small network has six heads",
            "heads=((384, 12),),",
            "",
            "test_bring.py::test_what_no_tensor_says",
        ),
    ),
    *fault.of(
        "bring/torch_file.py",
        _PROGRAMS,
        (
            "bring: a view reads beyond its storage",
            "if 0 not in shape and offset + last >= storage.count:",
            "if 0 not in shape and last >= storage.count:",
        ),
        (
            "bring: a view may be of any size",
            "math.prod(shape) * storage.dtype.itemsize > _MOST_TENSOR",
            "math.prod(shape) < 0",
        ),
        (
            "bring: a storage may have other numbers than it says",
            "if have != want * view.storage.dtype.itemsize:",
            "if have < 0:",
        ),
        (
            "bring: views of a storage begin at its first number",
            "numbers[view.offset :], view.shape",
            "numbers, view.shape",
            "test_bring.py::test_a_tensor_by_hand_and_views_of_it",
        ),
        (
            "bring: TorchScript is read",
            'if f"{folder}/constants.pkl" in entries:',
            'if f"{folder}/constant.pkl" in entries:',
            "test_bring.py::test_archives_of_another_kind",
        ),
    ),
    *fault.of(
        "bring/files.py",
        "test_bring.py::test_damaged_safetensors_are_refused",
        (
            "bring: a name may come twice",
            "if len({*names}) < len(names) or",
            "if",
        ),
        (
            "bring: the length of a header makes a file one of PyTorch",
            ' and data[8:9] != b"{":',
            ":",
            "test_bring.py::"
            "test_the_length_of_a_header_is_not_taken_for_a_file_of_pytorch",
        ),
        (
            "bring: parts may lie elsewhere",
            """or "/" in name or "\\\\" in name""",
            """or "\\\\" in name""",
            "test_bring.py::test_parts_of_a_file_and_sixteen_bits",
        ),
        (
            "bring: numbers may be infinite",
            "if not np.isfinite(x).all():",
            "if x is None:",
            _WRONG,
        ),
    ),
    *fault.of(
        "export/torch_convnext.py",
        "test_bring.py::test_a_convnext_is_read_by_the_names_of_every_library",
        (
            "bring: torchvision's stages follow without what is between them",
            "before=2 * stage, after=2 * stage + 1",
            "before=2 * stage - 1, after=2 * stage",
        ),
        (
            "export: a ConvNeXt of patches of 2 or 8 is written for timm",
            'if section["patch"] not in (1, 3, 4, 5, 6, 7):',
            'if section["patch"] < 1:',
            "test_bring.py::test_a_convnext_that_timm_computes_in_another_way_is_not_"
            "written",
        ),
    ),
    *fault.of(
        "bring/architectures.py",
        "test_bring.py::test_a_convnext_is_read_by_the_names_of_every_library",
        (
            "bring: a V2 is taken for a V1 without factors",
            '"grn": bool(scheme.grn[0]) and f"{first}{scheme.grn[0]}" in tensors,',
            '"grn": False,',
        ),
    ),
    *fault.of(
        "bring/architectures.py",
        "test_bring.py::test_a_file_without_positions_is_no_plain_vit",
        (
            "bring: a file without positions is an AttributeError",
            "if not side and architecture.images is None:",
            "if False:",
        ),
        slow=True,
    ),
]
