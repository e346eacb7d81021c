"""Warnings about rules of a bucket that would hurt a store in it.

If a rule deletes a root, the root's number becomes free, and two commits may get the same number:
see I3 in ``docs/commit-protocol.md``. So no rule may delete current objects. Rules that delete
*noncurrent* versions are safe. Where the bucket keeps versions, only such rules free space.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from casnap.format.names import STORE_FOLDER

_COLD = {"GLACIER", "DEEP_ARCHIVE", "COLDLINE", "ARCHIVE"}
"""Storage classes whose objects are slow, dear or impossible to read at once."""
_EXPIRES = (
    "{rule} deletes objects of the store when they are old. A root that is deleted frees its "
    "number, and then committed snapshots can be lost: take the store's prefix out of the rule"
)
_MOVES = (
    "{rule} moves objects of the store to {storage_class}, where they cannot be read at once, or "
    "cost more to read"
)
_KEPT = (
    "the bucket keeps old versions, and no rule deletes them below packs/: packs that gc deletes "
    "still take up space. Add a rule that deletes noncurrent versions"
)
_LOCKED = "the bucket keeps deleted objects for {days}: deleted packs take up space until then"


def s3_warnings(
    prefix: str,
    lifecycle: Mapping[str, Any],
    versioning: Mapping[str, Any],
    lock: Mapping[str, Any],
) -> list[str]:
    """Return warnings about the rules of an S3 bucket that can hurt a store, in words.

    Args:
        prefix: The prefix of the store in the bucket: empty, or ending in a slash.
        lifecycle: The response to GetBucketLifecycleConfiguration.
        versioning: The response to GetBucketVersioning.
        lock: The response to GetObjectLockConfiguration.
    """
    prefix = f"{prefix}{STORE_FOLDER}/"
    rules = [rule for rule in lifecycle.get("Rules", ()) if rule.get("Status") == "Enabled"]
    warnings = [text for rule in rules for text in _s3_rule(prefix, rule)]
    frees = any(
        "NoncurrentVersionExpiration" in rule and _covers(prefix + "packs/", [_s3_prefix(rule)])
        for rule in rules
    )
    if versioning.get("Status") == "Enabled" and not frees:
        warnings.append(_KEPT)
    default = lock.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention", {})
    if default:
        years = default.get("Years")
        days = f"{years} years" if years else f"{default.get('Days')} days"
        warnings.append(_LOCKED.format(days=f"{days} (Object Lock)"))
    return warnings


def _s3_rule(prefix: str, rule: Mapping[str, Any]) -> Iterator[str]:
    condition = rule.get("Filter", {})
    condition = condition.get("And", condition)
    if condition.get("Tag") or condition.get("Tags") or not _meets(prefix, [_s3_prefix(rule)]):
        # Objects of casnap have no tags.
        return
    name = f"the lifecycle rule {rule.get('ID', '')!r}"
    if {"Days", "Date"} & set(rule.get("Expiration", {})):
        yield _EXPIRES.format(rule=name)
    for move in rule.get("Transitions", ()):
        if move.get("StorageClass") in _COLD:
            yield _MOVES.format(rule=name, storage_class=move["StorageClass"])


def _s3_prefix(rule: Mapping[str, Any]) -> str:
    condition = rule.get("Filter", {})
    condition = condition.get("And", condition)
    return str(condition.get("Prefix") or rule.get("Prefix") or "")


def gcs_warnings(prefix: str, bucket: Mapping[str, Any]) -> list[str]:
    """Return warnings about the rules of a GCS bucket that can hurt a store, in words.

    Args:
        prefix: The prefix of the store in the bucket: empty, or ending in a slash.
        bucket: The bucket's metadata.
    """
    prefix = f"{prefix}{STORE_FOLDER}/"
    warnings: list[str] = []
    frees = False
    for number, rule in enumerate(bucket.get("lifecycle", {}).get("rule", ())):
        action, condition = rule.get("action", {}), rule.get("condition", {})
        prefixes = condition.get("matchesPrefix") or [""]
        is_old = condition.get("isLive") is False or bool(
            {"numNewerVersions", "daysSinceNoncurrentTime", "noncurrentTimeBefore"} & set(condition)
        )
        name = f"the lifecycle rule {number}"
        if action.get("type") == "Delete" and is_old:
            frees = frees or _covers(prefix + "packs/", prefixes)
        elif action.get("type") == "Delete" and _meets(prefix, prefixes):
            warnings.append(_EXPIRES.format(rule=name))
        elif action.get("storageClass") in _COLD and not is_old and _meets(prefix, prefixes):
            warnings.append(_MOVES.format(rule=name, storage_class=action["storageClass"]))
    if bucket.get("versioning", {}).get("enabled") and not frees:
        warnings.append(_KEPT)
    periods = {
        "soft delete": bucket.get("softDeletePolicy", {}).get("retentionDurationSeconds"),
        "its retention policy": bucket.get("retentionPolicy", {}).get("retentionPeriod"),
    }
    for reason, seconds in periods.items():
        if int(seconds or 0):
            warnings.append(_LOCKED.format(days=f"{int(seconds) / 86400:g} days ({reason})"))
    return warnings


def _covers(folder: str, prefixes: Sequence[str]) -> bool:
    return any(folder.startswith(prefix) for prefix in prefixes)


def _meets(store: str, prefixes: Sequence[str]) -> bool:
    """Whether a rule of the bucket applies to objects of a store. Objects in ``tmp/`` do not count.

    Args:
        store: The prefix of the store's objects.
        prefixes: The prefixes of keys that the rule is for.
    """
    return any(
        store.startswith(prefix)
        or (prefix.startswith(store) and not prefix.startswith(store + "tmp/"))
        for prefix in prefixes
    )
