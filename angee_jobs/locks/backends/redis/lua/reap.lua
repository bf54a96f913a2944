-- Remove holds that expired a while ago, the oldest first.
--
-- KEYS  the index
-- ARGV  how long ago in microseconds, how many at most, what stands before a name in the key of its hold, and in that of
--       its members
-- Returns the number of entries looked at, and how many holds were removed.

local time = redis.call('TIME')
local limit = time[1] * 1000000 + time[2] - ARGV[1]

local names = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', limit), 'LIMIT', 0, ARGV[2])
local removed = 0
for _, name in ipairs(names) do
    local key = ARGV[3] .. name
    local hold = redis.pcall('GET', key)
    local expires = type(hold) == 'string' and tonumber(string.sub(hold, 1, 16))
    if expires and expires > limit then
        redis.call('ZADD', KEYS[1], string.format('%.0f', expires), name) -- the index was wrong
    else
        redis.call('ZREM', KEYS[1], name)
        if type(hold) == 'string' then -- another kind of key is not ours
            redis.call('DEL', key)
            if string.sub(hold, 49, 50) ~= '--' then -- the gate of shared and placed holds is none itself
                removed = removed + 1
            end
        end
        local at = string.find(name, '\1', 1, true)
        if at then
            redis.pcall('ZREM', ARGV[4] .. string.sub(name, 1, at - 1), string.sub(name, at + 1))
        end
    end
end
return {#names, removed}
