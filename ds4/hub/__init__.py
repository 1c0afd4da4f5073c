"""Files from a hub: what a repository publishes, fetched in pieces that survive any interruption, and checked.

`names` says what a file is and by which published sum it is known; `plan` chooses files of a repository and what
joins to what; `client` asks the hub and streams bytes (`chunks`: of its chunk storage); `part` writes them; `fetch`
does all of it for one folder.
"""
