"""The rules of the protocol that can be dropped, one at a time, to see what they are for."""

from __future__ import annotations

from enum import Enum


class Rule(Enum):
    """What a correct process does; a model that drops the rule does what the value says."""

    FENCE_CHECK = "a take commits although the fence is past its base"
    RESCUE = "a take leaves condemned what it relied on"
    WHOLE_PACK_RESCUE = "a take rescues its own digests of a pack, and the others are freed"
    RAISED_FENCE = "a collector frees under a fence that its root does not name"
    FENCE_ON_FREEING = "a collector frees without a greater fence, and deletes only what it freed"
    POSITIVE_LIVENESS = "a take believes that what is not condemned is live"
    MERGE_KEEPS_FIRST = "a merge keeps one place of a digest, the last"
    MERGE_KEEPS_LAST = "a merge keeps one place of a digest, the first"
    NUMBERS_KEPT = "a collector removes old roots, so their numbers can be put again"
    PACKS_KEPT_IN_DOUBT = "a writer in doubt deletes its packs"
    ORPHANS_BELOW_FENCE = "a collector deletes orphans of any age"
    ROOT_BEFORE_DELETION = "a collector deletes packs and then puts the root without them"
    MERGE_OF_NAMED = "a merge is published on a root that does not name its inputs"
    MARK_AGAIN = "a collector that lost the number condemns what it had marked before"
    SUBTREE_STILL_THERE = "a take takes over, unseen, what is of a snapshot that was deleted since"
    SUBTREE_IS_THE_SAME = "a take takes over, unseen, what a snapshot has lost since by thinning"
    REBASED_IDS = "a rebase leaves own packs under their old ids"
    REBASE_CHECK = "a take does not look at what it relied on when it rebases"
    DOUBT_IS_NOT_FAILURE = "a lost answer is taken for a lost number"
    DOUBT_IS_NOT_SUCCESS = "a lost answer is taken for success"
    COPIES_IN_BASE = "a collector condemns a sparse pack whose copies it saw in an older root"
    DEDUP_LIVE_ONLY = "a take finds chunks in condemned packs and does not rescue them"
    PACK_BEFORE_SEGMENT = "a take writes its segment, then its pack, then the root"
    PACK_BEFORE_ROOT = "a take puts the root and then writes its pack"
    SEGMENT_BEFORE_ROOT = "a take puts the root and then writes its segment"
    DOUBT_IS_SETTLED = "a writer in doubt goes to another number while its own is still free"
    TAKES_ARE_SEEN = "a collector raises the fence past takes that have announced themselves"
    BASES_ARE_NEEDED = "a collector does not mark the bases of deltas"
    NEW_BASES_AGAIN = "a collector that lost the number does not mark the bases of new deltas"
    BASES_RELIED_ON = "a writer relies on a delta without its base"
    CHAINS_END = "a collector counts a delta as another place though its chain is a circle"
    COPIES_HAVE_END = "a collector copies a delta although its base stands on the same chunk"
    LATE_IS_WAITED_FOR = "what must be there, and is not seen yet, is taken for damage"
    READER_PERSISTS = "a reader looks a missing chunk up again only once"
