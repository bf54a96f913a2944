-- One page of the holds that expired a while ago, the oldest first.
--
-- KEYS  the index
-- ARGV  how long ago in microseconds, how many to skip, length of a page, what stands before a name in the key of
--       its hold
-- Returns the time in microseconds, the number of entries looked at, and name and hold of each.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local limit = string.format('%.0f', now - ARGV[1])
local names = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', limit, 'LIMIT', ARGV[2], ARGV[3])
local answer = {string.format('%.0f', now), #names}
for _, name in ipairs(names) do
    local hold = redis.pcall('GET', ARGV[4] .. name)
    local gate = type(hold) == 'string' and string.sub(hold, 49, 50) == '--'
    if type(hold) == 'string' and #hold >= 112 and not gate and not string.find(string.sub(hold, 1, 48), '%D') then
        answer[#answer + 1] = name
        answer[#answer + 1] = hold
    end
end
return answer
