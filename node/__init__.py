"""What a node does. Every room below may use the rooms before it in this order, never one behind it:
`errors`, `models`, `blocks`, `network`, `trust`, `swarm`, `verification`, `placement`, `client`, `server`, `validator`,
`tuning`, `credits`, `cli`.
"""
