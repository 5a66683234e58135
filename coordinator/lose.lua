-- Mark a session as lost: clients were shown another text than the store has, so nobody is shown any more of it.
-- KEYS: meta
-- ARGV: none
if redis.call('EXISTS', KEYS[1]) == 1 and redis.call('HGET', KEYS[1], 'status') ~= 'lost' then
  redis.call('HSET', KEYS[1], 'status', 'lost')
  redis.call('HINCRBY', KEYS[1], 'epoch', 1)
end
return 'lost'
