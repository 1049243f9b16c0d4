"""One engine as a deployment of Ray Serve.

`replica` is the deployment: it takes requests on, sends each ingress what happens to its own, and says how it fares.
The engine has a thread of its own (`engine_thread`), so that nobody waits for a step who only asks. `progress` is how a
replica that starts tells the terminal of `tidar up` what it does.
"""
