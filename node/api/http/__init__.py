"""HTTP/1.1 on trio: `server` carries requests and ends what nobody waits for any more. `admission` and `keys` say who
is let in, `answers` sends what the engine makes. May use the errors and fields of the API, and `engine`."""
