-- End a session from outside; its owner learns of it at its next commit.
-- KEYS: meta
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'active' then
  redis.call('HSET', KEYS[1], 'status', 'cancelled', 'finish', 'CANCELLED')
  status = 'cancelled'
end
return status
