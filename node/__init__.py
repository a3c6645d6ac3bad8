"""What a node does. Every room below may use the rooms before it in this order, never one behind it, and `client` and
`server` do not use each other:
`errors`, `version`, `models`, `blocks`, `network`, `trust`, `swarm`, `links`, `weights`, `verification`, `placement`,
`client`, `server`, `validator`, `tuning`, `credits`, `api`, `monitoring`, `web`, `cli`, `testing`.
"""
