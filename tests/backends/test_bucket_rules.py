"""Rules of a bucket that can hurt a store are named; those that cannot are not."""

from __future__ import annotations

from typing import Any

import pytest

from casnap.backends.remote.bucket_rules import gcs_warnings, s3_warnings

EXPIRES, MOVES, KEPT, LOCKED = "deletes objects", "moves objects", "old versions", "keeps deleted"


def s3_rule(**fields: Any) -> dict[str, Any]:
    return {"ID": "r", "Status": "Enabled", "Filter": {"Prefix": ""}, **fields}


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (s3_rule(Expiration={"Days": 30}), EXPIRES),
        (
            s3_rule(
                Expiration={"Date": "2030-01-01"}, Filter={"Prefix": "run1/casnap-store/roots/"}
            ),
            EXPIRES,
        ),
        (s3_rule(Expiration={"Days": 30}, Filter={}, Prefix="run"), EXPIRES),
        (
            s3_rule(Expiration={"Days": 1}, Filter={"And": {"Prefix": "run1/casnap-store/packs"}}),
            EXPIRES,
        ),
        (s3_rule(Expiration={"Days": 30}, Status="Disabled"), None),
        (s3_rule(Expiration={"Days": 30}, Filter={"Prefix": "run2/"}), None),
        (s3_rule(Expiration={"Days": 30}, Filter={"Prefix": "run1/casnap-store/tmp/"}), None),
        (s3_rule(Expiration={"Days": 30}, Filter={"Tag": {"Key": "a", "Value": "b"}}), None),
        (s3_rule(Expiration={"ExpiredObjectDeleteMarker": True}), None),
        (s3_rule(NoncurrentVersionExpiration={"NoncurrentDays": 1}), None),
        (s3_rule(AbortIncompleteMultipartUpload={"DaysAfterInitiation": 1}), None),
        (s3_rule(Transitions=[{"Days": 30, "StorageClass": "STANDARD_IA"}]), None),
        (s3_rule(Transitions=[{"Days": 30, "StorageClass": "GLACIER"}]), MOVES),
    ],
)
def test_rules_of_s3(rule: dict[str, Any], problem: str | None) -> None:
    found = s3_warnings("run1/", {"Rules": [rule]}, {}, {})
    assert len(found) == (problem is not None)
    assert all(problem is not None and problem in text for text in found)


def test_versions_of_s3() -> None:
    kept = {"Status": "Enabled"}
    assert KEPT in s3_warnings("run1/", {}, kept, {})[0]
    frees = s3_rule(NoncurrentVersionExpiration={"NoncurrentDays": 1}, Filter={"Prefix": "run1/"})
    assert s3_warnings("run1/", {"Rules": [frees]}, kept, {}) == []
    assert s3_warnings("run2/", {"Rules": [frees]}, kept, {}) != []
    assert s3_warnings("", {}, {"Status": "Suspended"}, {}) == []


def test_object_lock() -> None:
    lock = {"Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 9}}}
    (found,) = s3_warnings("", {}, {}, {"ObjectLockConfiguration": lock})
    assert "9 days" in found
    assert s3_warnings("", {}, {}, {"ObjectLockConfiguration": {"ObjectLockEnabled": "E"}}) == []


def gcs_rule(action: str, storage_class: str = "", **condition: Any) -> dict[str, Any]:
    return {"action": {"type": action, "storageClass": storage_class}, "condition": condition}


@pytest.mark.parametrize(
    ("bucket", "problem"),
    [
        ({}, None),
        ({"lifecycle": {"rule": [gcs_rule("Delete", age=30)]}}, EXPIRES),
        ({"lifecycle": {"rule": [gcs_rule("Delete", age=1, matchesPrefix=["x/"])]}}, None),
        ({"lifecycle": {"rule": [gcs_rule("Delete", age=1, isLive=False)]}}, None),
        ({"lifecycle": {"rule": [gcs_rule("Delete", numNewerVersions=1)]}}, None),
        ({"lifecycle": {"rule": [gcs_rule("SetStorageClass", "ARCHIVE", age=9)]}}, MOVES),
        ({"lifecycle": {"rule": [gcs_rule("SetStorageClass", "NEARLINE", age=9)]}}, None),
        ({"versioning": {"enabled": True}}, KEPT),
        ({"softDeletePolicy": {"retentionDurationSeconds": "604800"}}, "7 days (soft delete)"),
        ({"softDeletePolicy": {"retentionDurationSeconds": "0"}}, None),
        ({"retentionPolicy": {"retentionPeriod": "86400"}}, LOCKED),
    ],
)
def test_rules_of_gcs(bucket: dict[str, Any], problem: str | None) -> None:
    found = gcs_warnings("run1/", bucket)
    assert len(found) == (problem is not None)
    assert all(problem is not None and problem in text for text in found)
