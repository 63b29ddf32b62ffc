"""YAML as its writers mean it.

PyYAML by itself reads `no` as false, 010 as 8, 1:30 as 90, and of two equal keys of an object the last one alone.
"""

import math
from typing import Any

import yaml


class UniqueKeys(yaml.SafeLoader):
    """YAML in which no object has a key twice, of which the first would count for nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


class AsWritten(UniqueKeys):
    """YAML in which each word without quotes is a text, as it is written; but for `null`, and numbers such as .inf."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if not isinstance(node, yaml.ScalarNode) or node.style is not None or node.tag.endswith(":null"):
            return super().construct_object(node, deep)
        if node.tag.endswith(":float") and not math.isfinite(number := self.construct_yaml_float(node)):
            return str(number)  # as flags take it
        return node.value
