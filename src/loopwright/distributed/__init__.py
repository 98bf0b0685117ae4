"""Several processes as one: started together, joined in a group, each with a shard of the weights.

launch(4, work, ("run.yaml",))                      # four processes of this machine; or start them by torchrun
with group.joined("cuda") as ours:                  # rank `ours.rank` of `ours.ranks`; one process is a group too
    shard.shard(network, ours.mesh, "bfloat16")     # float32 masters, computed in bfloat16
"""
