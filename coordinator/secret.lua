-- Return the secret that keys session ids, the same for all coordinators of this store; the first one brings it.
-- KEYS: secret
-- ARGV: a new secret
local known = redis.call('GET', KEYS[1])
if known then
  return known
end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
