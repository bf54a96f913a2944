-- Let the leases that are still held by their owner end later; never sooner.
--
-- KEYS  the index, the holds
-- ARGV  for each hold: name, owner, ttl in microseconds
-- Returns a string with 1 for each hold that was extended, and 0 for the others.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local answer = {}
for i = 2, #KEYS do
    local at = 3 * (i - 2)
    local name, owner = ARGV[at + 1], ARGV[at + 2]
    local hold = redis.call('GET', KEYS[i])
    local expires = hold and tonumber(string.sub(hold, 1, 16))
    if expires and expires > now and string.sub(hold, 49, 112) == owner then
        expires = math.max(expires, now + ARGV[at + 3])
        -- The ZREM first: a script that has removed something may also write when the memory is full, and to
        -- renew a hold takes no more than it had. With pcall: the index only makes lists fast.
        redis.pcall('ZREM', KEYS[1], name)
        redis.pcall('ZADD', KEYS[1], string.format('%.0f', expires), name)
        redis.call('SET', KEYS[i], string.format('%016.0f', expires) .. string.sub(hold, 17))
        answer[#answer + 1] = '1'
    else
        answer[#answer + 1] = '0'
    end
end
return table.concat(answer)
