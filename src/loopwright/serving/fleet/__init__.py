"""Several servers as one: replicas in processes of their own, and a front that sends each request to one of them.

    run.serve(order, replicas=4, sock=sock)

`router` chooses, `front` passes requests on, `members` starts replicas and lets others inherit from those that end,
`replica` is the server that they are, `actors` has Ray place it. Deliberately absent: replicas on several machines,
whose folders would have to be on a shared file system.
"""
