"""What each command does: composes the rooms below, says nothing itself but through the console's views.

A module a command, and besides: `common` and `stepping`, which several share; `start`, the ranks of `train`; `dry_run`, its
`--dry-run`; `profile_ranks` and `layouts`, `profile` on several ranks.
"""
