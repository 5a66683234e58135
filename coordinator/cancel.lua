-- End a session from outside; its owner learns of it at its next commit or heartbeat.
-- KEYS: meta
-- ARGV: the epoch at which its last client left, to end it only if nobody has claimed it since; empty: in any case
local state = redis.call('HMGET', KEYS[1], 'status', 'epoch')
local status = state[1]
if status == 'active' and (#ARGV[1] == 0 or state[2] == ARGV[1]) then
  redis.call('HSET', KEYS[1], 'status', 'cancelled', 'finish', 'CANCELLED')
  status = 'cancelled'
end
return status
