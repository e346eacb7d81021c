"""An explicit-state model of the protocol by which takes, deletes and collections share a store.

The model knows none of casnap's code. It has *packs*, which hold digests; *segments*, which list
packs with what they hold; and *roots*, numbered from 1, which name snapshots (sets of digests),
segments, condemned packs and a fence. Packs and segments are files: they are there or not. A root
is put only if its number is free, and the newest one says what the store holds. A pack is *live*
in a root that lists it and does not condemn it. The name of a file has the number of the root that
it was written under, its *base*.

A process does one of these things; each step looks at or changes the store once:

=========  =========================================================================================
take       reads the newest root n; relies on live packs for what they hold; writes the rest into a
           pack of its own; reads the newest root m, which may be later; drafts root m + 1; writes
           a segment (its own, or one of all that m lists: a *merge*); puts the root. If that number
           is taken, it goes on from reading m. It is *fenced*, and gives up, if fence(m) > n or if
           m does not list a pack that it relies on; what m condemns of those, its root *rescues*.
           Instead of giving up for the fence it may *rebase*: link its pack to an id under m, if it
           is still there, and go on with m for its base.
           Subtrees of a snapshot in n it may take over without looking for their chunks, if that
           snapshot is in m too; else it is fenced.
overwrite  is a take whose snapshot replaces that of the same name
repack     is a take without a snapshot, whose pack has what is needed of another
recode     is a take without a snapshot, whose pack has a needed digest as a *delta* of another one,
           its *base*, without which that cannot be read
delete     puts a root without the snapshot of one commit, if that is there
collector  condemns in root k + 1 what no snapshot of k needs, nor a delta of that (and, one at a
           time, packs whose needed chunks have another live place: as they are, or as a delta whose
           chain ends, each link at its newest place); if the number is lost, it spares what a newer
           root needs; then raises the fence in root m + 1 to any number
           up to m + 1, with what was condemned at or before it listed no more; then deletes, in any
           order, files that its root does not name and whose base is below its fence
reader     looks a chunk up in the newest root and reads that pack; if it is gone, and the snapshot
           is not, looks it up again as long as roots follow each other
=========  =========================================================================================

The answer to a put may get lost: then the writer is *in doubt*, and the number decides. Its own
root there: it is done. Another's: the number is lost. None: it puts the same root under the same
number again, for the first try may still come into force (`late_puts`).

Where clients *cache*, a look at the newest root shows any root since the last look of that process.
A put is decided by what stands, and who loses a number has seen the root that took it.

A take may *announce* itself before it reads n. Collectors see that, and raise the fence no further.

Three invariants hold in every state, and so after every crash, which is but a process that never
moves again:

- **I1** Every digest that a snapshot of the newest root needs is in a live pack, which exists: as
  it is, or as a delta of a base of which the same is true.
- **I2** All segments and packs that the newest root lists exist, condemned ones too.
- **I3** A writer that believes in its commit is right: its snapshot is in the newest root, unless a
  later root removed it; and a snapshot that a process believes to have deleted is not there.

And no reader fails while its snapshot is in the newest root; (**L1**) no take is fenced that had
announced itself before the collector looked; and (**L2**) nobody takes for damage what it does not
see yet.

`records` is what states are made of, `processes` and `collector` are the steps, `protocol` puts
them together and has the invariants, `explorer` searches, `rules` are what can be dropped, and
`scenarios` are the bounds. Not modelled: trees (a digest stands for all that a snapshot refers
to), more than one own pack, and damage.
"""
