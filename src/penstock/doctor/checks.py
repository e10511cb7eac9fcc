"""The checks of one machine, in the order in which they are made and shown."""

from collections.abc import Mapping

from penstock.doctor import (
    corpus,
    devices,
    disk,
    interfaces,
    kernel,
    limits,
    object_store,
    processors,
    speeds,
    variables,
)
from penstock.doctor.check import Check

CHECKS: Mapping[str, Check] = {
    module.CHECK: module
    for module in (
        devices,
        processors,
        limits,
        interfaces,
        variables,
        kernel,
        speeds,
        disk,
        object_store,
        corpus,
    )
}
