"""A simulated system: pools that answer from timers and clients that cost next to nothing, around real orchestrators.

path.py     the text behind a prompt, the same for both pools
target.py   sessions of a simulated target
draft.py    sessions of a simulated draft
pools.py    their servers, all in one process
http2.py    as much of HTTP/2 as a cheap client takes
load.py     the clients
folder.py   a model folder without weights
profile.py  where a service's CPU time goes
run.py      a scenario, measured
"""
