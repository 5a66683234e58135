-- Write a session as clients were shown it: the store went back in time, and has a part of it or nothing. Others may
-- have been shown more: a lease that nobody owns keeps all coordinators from going on before those have brought it.
-- KEYS: meta, tokens, origins, logprobs
-- ARGV: epoch, length and digest that the caller has read (empty: there is no session), time to live (ms),
--       packed tokens, packed origins, packed logprobs, length of the lease (ms), then meta's fields and values
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'length', 'digest')
for field = 1, 3 do
  if (meta[field] or '') ~= ARGV[field] then
    return 'changed'
  end
end
redis.call('DEL', unpack(KEYS))
redis.call('HSET', KEYS[1], unpack(ARGV, 9))
renew_lease(KEYS[1], ARGV[8])
for part = 2, 4 do
  if #ARGV[part + 3] > 0 then
    redis.call('SET', KEYS[part], ARGV[part + 3])
  end
end
for _, key in ipairs(KEYS) do
  redis.call('PEXPIRE', key, ARGV[4])
end
return 'restored'
