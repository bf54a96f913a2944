-- The live holds of some names, also the shared and placed ones.
--
-- KEYS  for each name its hold or gate, and its members
-- ARGV  for each name the name, and what stands before an id in the key of a member
-- Returns the time in microseconds, the number of names, and name and hold of each hold.

local answer = {string.format('%.0f', now), #KEYS / 2}
local function tell(name, key)
    local hold = redis.pcall('GET', key)
    if type(hold) == 'string' and ends(hold) > now then
        answer[#answer + 1] = name
        answer[#answer + 1] = hold
    end
end

for i = 1, #KEYS, 2 do
    local hold = redis.pcall('GET', KEYS[i])
    if type(hold) == 'string' and owner_of(hold) == GATE then
        for _, id in ipairs(redis.call('ZRANGE', KEYS[i + 1], 0, -1)) do
            tell(ARGV[i] .. '\1' .. id, ARGV[i + 1] .. id)
        end
    else
        tell(ARGV[i], KEYS[i])
    end
end
return answer
